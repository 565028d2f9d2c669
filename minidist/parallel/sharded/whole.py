"""The whole state of a model whose parameters are spread over ranks: to read it, to save it, to
load it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA

from minidist.collectives import all_gather
from minidist.parallel.data.buckets import views_into
from minidist.parallel.sharded.shard import Sharded
from minidist.parallel.sharded.units import Flat


class Whole(Sharded):
    """A sharded model that returns and loads whole parameters. A rank sends (P - 1)/P of the bytes
    it returns.
    """

    flats: list[Flat]
    shard_of: dict[nn.Parameter, Flat]
    readable: bool

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole of each parameter, in the optimizer's dtype, gathering a unit at a
        time. Collective.
        """
        for flat in self.flats:
            for parameter, value in zip(flat.parameters, _gathered(flat, flat.values), strict=True):
                yield self.names[parameter], value

    def full_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield name and whole gradient of each trained parameter, None if it has none, a unit at a
        time. Collective.

        They are the gradients of the slices: reduced and, after clipping, clipped.
        """
        for flat in (flat for flat in self.flats if flat.trained):
            mine = torch.zeros_like(flat.values)
            for parameter, piece in flat.slices.items():
                if piece.grad is not None:
                    mine[flat.held[parameter]] = piece.grad
            for parameter, value in zip(flat.parameters, _gathered(flat, mine), strict=True):
                yield self.names[parameter], None if flat.slices[parameter].grad is None else value

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the `state_dict` that the serial model would have, on the CPU of every rank.
        Collective.
        """
        whole = {name: value.to("cpu", copy=True) for name, value in self.full_tensors()}
        every = self.module.named_parameters(remove_duplicate=False)
        aliases = {
            name: self.names[parameter] for name, parameter in every if parameter in self.names
        }
        self.readable = True
        # for its names, their order, and the buffers: not for values
        with torch._C.DisableTorchFunctionSubclass():
            state = self.module.state_dict()
        self.readable = False
        return {
            name: whole[aliases[name]] if name in aliases else value.cpu()
            for name, value in state.items()
        }

    def load(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Load whole parameters: a serial model's state, or pairs that are drawn one by one. Every
        rank needs them all.

        Raises
        ------
        ValueError
            If names or shapes are not this model's. If `tensors` is a `Mapping`, nothing has
            changed then.
        """
        targets = dict(self.module.named_buffers()) | dict(
            self.module.named_parameters(remove_duplicate=False)
        )
        every = self.module.named_modules()
        extra = {
            f"{name}.{EXTRA}".lstrip("."): module.set_extra_state
            for name, module in every
            if keeps_more(module)
        }
        missing, wrong = set(self.names.values()), []
        writes: list[Callable[[], object]] = []
        for name, value in tensors.items() if isinstance(tensors, Mapping) else tensors:
            target = targets.get(name)
            if name in extra:
                writes.append(partial(extra[name], value))
            elif target is None or target.shape != value.shape:
                here = "nothing" if target is None else list(target.shape)
                wrong.append(f"{name} is {list(value.shape)} there and {here} here")
            elif isinstance(target, nn.Parameter) and target in self.shard_of:
                writes.append(partial(self.shard_of[target].write, target, value))
                missing.discard(self.names[target])
            else:  # a buffer, or an ignored parameter
                writes.append(partial(target.detach().copy_, value))
            # what is drawn one by one may not fit at once
            while writes and not isinstance(tensors, Mapping):
                writes.pop()()
        wrong += [f"{name} is missing" for name in self.names.values() if name in missing]
        if wrong:
            more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ValueError(
                f"these parameters belong to another model: {'; '.join(wrong[:3])}{more}"
            )
        for write in writes:
            write()
        self.stepped()


def keeps_more(module: nn.Module) -> bool:
    """Tell whether a module's state has more than tensors that are parameters or buffers: such as a
    router's bias.
    """
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _gathered(flat: Flat, mine: Tensor) -> list[Tensor]:
    """Gather all ranks' elements, `mine` being this rank's; return a tensor for each parameter."""
    whole = torch.empty(sum(flat.counts), dtype=mine.dtype, device=flat.device)
    all_gather(mine.to(flat.device), flat.comm, out=whole, counts=flat.counts)
    return views_into(whole, flat.parameters)
