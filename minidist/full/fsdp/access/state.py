"""The whole state of a model whose parameters are spread over ranks: to read it, to save it, to
load it.

Functions over flats: each gathers one at a time, so that a rank has room for no more. A rank sends
(P - 1)/P of the bytes it returns.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA

from minidist.full.collectives import all_gather
from minidist.full.comm import Communicator
from minidist.full.ddp.flatten import views_into
from minidist.full.ddp.replicas import copy_from_root, keeps_more
from minidist.full.fsdp.flat import Flat

Names: TypeAlias = dict[nn.Parameter, str]


def full_tensors(flats: list[Flat], names: Names) -> Iterator[tuple[str, Tensor]]:
    """Yield name and whole of each parameter, in the optimizer's dtype. Collective."""
    for flat in flats:
        whole = gathered(flat, flat.shard.values)
        for parameter, value in zip(flat.parameters, whole, strict=True):
            yield names[parameter], value


def full_gradients(flats: list[Flat], names: Names) -> Iterator[tuple[str, Tensor | None]]:
    """Yield name and whole gradient of each trained parameter, None if it has none. Collective.

    They are the gradients of the slices: reduced and, after clipping, clipped.
    """
    for flat in (flat for flat in flats if flat.trained):
        shard = flat.shard
        mine = torch.zeros_like(shard.values)
        for parameter, piece in shard.slices.items():
            if piece.grad is not None:
                mine[shard.pieces[parameter]] = piece.grad.as_subclass(Tensor)
        for parameter, value in zip(flat.parameters, gathered(flat, mine), strict=True):
            yield names[parameter], None if shard.slices[parameter].grad is None else value


def gathered(flat: Flat, mine: Tensor) -> list[Tensor]:
    """Gather all ranks' elements, `mine` being this rank's; return a tensor for each parameter."""
    counts = flat.shard.counts
    whole = torch.empty(sum(counts), dtype=mine.dtype, device=flat.device)
    all_gather(mine.to(flat.device), flat.shard.comm, out=whole, counts=counts)
    return views_into(whole, flat.parameters)


def full_state_dict(
    model: nn.Module, flats: list[Flat], names: Names, comm: Communicator
) -> dict[str, Tensor]:
    """Return the `state_dict` that the serial model would have, on the CPU of every rank.

    Buffers are those of rank 0. Later steps change nothing of it. Collective.
    """
    whole = {name: value.to("cpu", copy=True) for name, value in full_tensors(flats, names)}
    every = model.named_parameters(remove_duplicate=False)
    aliases = {name: names[parameter] for name, parameter in every if parameter in names}
    # for its names, their order, and the buffers: not for values
    with torch._C.DisableTorchFunctionSubclass():
        state = model.state_dict()
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    found = {}
    for name, value in state.items():
        if name in aliases:
            found[name] = whole[aliases[name]]
            continue
        copied = value.clone()
        if name in buffers:
            copy_from_root(copied, comm)
        found[name] = copied.cpu()
    return found


def load(
    model: nn.Module,
    flat_of: Mapping[nn.Parameter, Flat],
    names: Names,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> None:
    """Load whole parameters into this rank's shards; publish them afterwards.

    Raises
    ------
    ValueError
        If names or shapes are not this model's, or a parameter or a buffer is missing. If
        `tensors` is a `Mapping`, nothing has changed then.
    """
    targets: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    targets |= dict(model.named_parameters(remove_duplicate=False))
    extra = {
        f"{name}.{EXTRA}".lstrip("."): module.set_extra_state
        for name, module in model.named_modules()
        if keeps_more(module)
    }
    missing: dict[Any, str] = {**names, **saved_buffers(model)}
    wrong = []
    writes: list[Callable[[], object]] = []
    at_once = isinstance(tensors, Mapping)
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    for name, value in pairs:
        target = targets.get(name)
        if target is not None:
            missing.pop(target, None)
        if name in extra:
            writes.append(partial(extra[name], value))
        elif target is None or target.shape != value.shape:
            here = "nothing" if target is None else list(target.shape)
            wrong.append(f"{name} is {list(value.shape)} there and {here} here")
        elif isinstance(target, nn.Parameter) and target in flat_of:
            writes.append(partial(flat_of[target].write, target, value))
        else:  # a buffer, or an ignored parameter
            writes.append(partial(target.detach().copy_, value))
        # what is drawn one by one may not fit at once
        while writes and not at_once:
            writes.pop()()
    wrong += [f"{name} is missing" for name in missing.values()]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"this is the state of another model: {'; '.join(wrong[:3])}{more}")
    for write in writes:
        write()


def saved_buffers(model: nn.Module) -> dict[Tensor, str]:
    """Return the names of the buffers that a model's state has: not those that are computed anew."""
    return {
        buffer: f"{name}.{label}".lstrip(".")
        for name, module in model.named_modules()
        for label, buffer in module.named_buffers(recurse=False)
        if label not in module._non_persistent_buffers_set
    }


def check_buffers(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError if buffers on `meta` would be zeros on `device`, and no state fills them."""
    saved = saved_buffers(model)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and device.type != "meta" and buffer not in saved:
            raise ValueError(
                f"the buffer {name} on meta would stay zeros, as no state has what is registered "
                f"with persistent=False: build its module anew on {device} before wrapping, and "
                "leave only parameters on meta"
            )
