"""The account: how many bytes a rank holds, for what, and when.

    activations     ▁▂▃▄▅▆▇█▇▆▅▄▃▂▁             what autograd saved for backward
    gradients                ▁▂▃▄▅▆▇█████▁
    optimizer                        ▁████      from the first step on
    parameters      ██████████████████████
                    ├ forward ┤ backward ┤ step

    with account.recording():
        loss = cross_entropy_sum(model(tokens), targets)
        loss.backward()
        optimizer.step()
    print(account.table())

Storages are counted, not tensors and not the process's pages, at the size they have now: views share theirs, and a
storage resized to 0 holds nothing. On the device `meta` a storage has a size as well, so a modelled cluster has an
account too. Each storage counts *once*, in the first category that claims it: what holders say, parameters (with the
model's buffers), gradients, optimizer, communication, activations. A piece of registered memory is one storage.

What a checkpoint, ours or torch's, computes again counts as activations while it is there. What is not seen: an
operation's own temporaries, gradients on their way, and what saved-tensor hooks inside ours keep from forward.

Cost: a sample walks all tensors, about a microsecond each, and there are two for each tensor that autograd saves: 0.3 s
a step for 4 layers, and four times as much for twice the layers. Every operation passes through Python.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minidist.comm import Communicator
from minidist.comm.buffers import address
from minidist.trace.table import format_bytes, format_seconds

if TYPE_CHECKING:
    from minidist.comm.buffers import Buffer

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "communication")

Timeline: TypeAlias = list[tuple[float, dict[str, int]]]
"""What was held from each moment on: seconds, and bytes by category."""


@runtime_checkable
class Holder(Protocol):
    """What can say for what it holds its memory: a strategy that wraps a model or an optimizer."""

    def held(self) -> Mapping[str, Iterable[Buffer]]:
        """Return tensors or arrays by category; they count there, whatever else they look like."""
        ...


class Account:
    """The bytes of one rank.

    Parameters
    ----------
    comm : Communicator, optional
        Its clock dates the samples, its trace gets an event whenever the total changes, its memory is watched.
    device : str, optional
        Count only what lies there, such as "cuda" or "cpu"; by default everything.

    Attributes
    ----------
    timeline : Timeline
        The samples that differed from the one before.
    """

    def __init__(self, comm: Communicator | None = None, device: str | None = None) -> None:
        self.comm, self.device = comm, device
        self.timeline: Timeline = []
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.holders: list[Holder] = []
        self.comms: list[Communicator] = [] if comm is None else [comm]
        self.saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.recomputed: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def watch(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | Holder | None = None,
        comm: Communicator | None = None,
    ) -> None:
        """Count these too, as they are at each sample. Watch a model as it is trained, in its wrappers."""
        if model is not None:
            self.models.append(model)
            self.holders += [module for module in model.modules() if isinstance(module, Holder)]
        if isinstance(optimizer, Holder):
            self.holders.append(optimizer)
        if isinstance(optimizer, Optimizer):
            self.optimizers.append(optimizer)
        if comm is not None:
            self.comms.append(comm)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Follow what autograd saves; sample then, when it is used, and before and after each module and step.

        Meanwhile autograd cannot tell that a saved tensor was changed in place, as with all saved-tensor hooks.
        """
        self.sample()
        with ExitStack() as hooks:
            for module in (module for model in self.models for module in model.modules()):
                hooks.callback(module.register_forward_pre_hook(self._boundary).remove)
                hooks.callback(module.register_forward_hook(self._boundary).remove)
            for optimizer in self.optimizers:
                hooks.callback(optimizer.register_step_post_hook(self._boundary).remove)
            hooks.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            hooks.enter_context(SecondForward(self.recomputed, self.sample))
            yield
        self.sample()

    def sample(self) -> dict[str, int]:
        """Count now, and return the bytes by category.

        Raises
        ------
        ValueError
            If a holder names a category that there is not.
        """
        windows = [(start, bytes) for comm in self.comms for start, bytes, _ in list(comm.registered.windows.values())]
        counted: set[int] = set()
        held = dict.fromkeys(CATEGORIES, 0)
        for category, buffer in self._claims():
            if category not in held:
                raise ValueError(f"held() names the category {category!r}: there are {', '.join(CATEGORIES)}")
            start, bytes, device = _storage(buffer, windows)
            if start not in counted and self.device in (None, device):
                counted.add(start)
                held[category] += bytes
        if not self.timeline or held != self.timeline[-1][1]:
            self._note(held)
        return held

    @property
    def now(self) -> dict[str, int]:
        """Bytes by category at the last sample."""
        return self.timeline[-1][1] if self.timeline else dict.fromkeys(CATEGORIES, 0)

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category when they were the most together."""
        return max((held for _, held in self.timeline), key=total, default=self.now)

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes of each category, at whatever moment that was."""
        return {name: max((held[name] for _, held in self.timeline), default=0) for name in CATEGORIES}

    def table(self) -> str:
        """Return the account as text: now, at the peak of all together, and each category's own peak."""
        columns = [self.now, self.peak, self.peaks]
        rows = [(name, *(format_bytes(column[name]) for column in columns)) for name in CATEGORIES]
        rows.append(("total", format_bytes(total(self.now)), format_bytes(total(self.peak)), ""))
        lines = [("", "now", "at the peak", "own peak"), *rows]
        text = [f"{name:<13}{now:>12}{peak:>14}{own:>12}".rstrip() for name, now, peak, own in lines]
        seconds = next((moment - self.timeline[0][0] for moment, held in self.timeline if held == self.peak), 0.0)
        return "\n".join([*text, f"peak {format_seconds(seconds)} after the first sample"])

    # ---------------------------------------------------------------- what is held

    def _claims(self) -> Iterator[tuple[str, Buffer | torch.UntypedStorage]]:
        """Yield everything there is with its category; of two that claim a storage, the first counts."""
        for holder in self.holders:
            for category, buffers in holder.held().items():
                yield from ((category, buffer) for buffer in buffers)
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        yield from (("parameters", parameter) for parameter in parameters)
        yield from (("parameters", buffer) for model in self.models for buffer in model.buffers())
        # What an optimizer steps and no model has is its own: the master weights of mixed precision.
        masters = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        yield from (("gradients", p.grad) for p in (*parameters, *masters) if p.grad is not None)
        yield from (("optimizer", master) for master in masters)
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        yield from (("optimizer", value) for state in states for value in state.values() if isinstance(value, Tensor))
        yield from (("communication", buffer) for comm in self.comms for buffer in _kept_by(comm))
        yield from (("activations", saved.tensor) for saved in self.saved)
        yield from (("activations", storage) for storage in self.recomputed)

    def _note(self, held: dict[str, int]) -> None:
        now = time.perf_counter() if self.comm is None else self.comm.clock()
        self.timeline.append((now, held))
        if self.comm is not None and self.comm.trace is not None:
            self.comm.trace.held(self.comm.members[self.comm.rank], now, total(held))

    # ---------------------------------------------------------------- hooks

    def _boundary(self, *_: object) -> None:
        self.sample()

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        self.saved.add(saved)
        self.sample()
        return saved

    def _unpack(self, saved: Saved) -> Tensor:
        self.sample()
        return saved.tensor


class Saved:
    """What autograd keeps in place of a tensor, and drops when it would drop the tensor.

    It holds the tensor without its history: an operation that saves its own output would keep itself alive.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class SecondForward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts what a forward within backward makes into `made`, which shall not keep it, and calls `ended` after it.

    Hooks on saved tensors cannot do this: a checkpoint's own hooks hide what it recomputes from those around them.
    """

    def __init__(self, made: weakref.WeakSet[torch.UntypedStorage], ended: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made, self.ended, self.inside = made, ended, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation. In backward, it is a forward's if gradients are enabled."""
        before, self.inside = self.inside, torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        if before and not self.inside:
            self.ended()
        result = function(*args, **(kwargs or {}))
        if self.inside:
            self.made.update(_storages(result) - _storages((args, kwargs)))
        return result


def _storages(values: object) -> set[torch.UntypedStorage]:
    return {leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


def total(held: Mapping[str, int]) -> int:
    """Return the bytes of all categories together."""
    return sum(held.values())


def _storage(buffer: Buffer | torch.UntypedStorage, windows: list[tuple[int, int]]) -> tuple[int, int, str]:
    """Return where the memory behind a buffer begins (a number, if it is meta), its bytes, and its device."""
    if isinstance(buffer, np.ndarray):
        start, bytes, device = address(buffer), buffer.nbytes, "cpu"
    else:
        storage = buffer.untyped_storage() if isinstance(buffer, Tensor) else buffer
        start, bytes, device = storage.data_ptr() or storage._cdata, storage.nbytes(), storage.device.type
    inside = (window for window in windows if window[0] <= start < window[0] + window[1])
    return *next(inside, (start, bytes)), device


def _kept_by(comm: Communicator) -> Iterator[Any]:
    """Yield the registered memory of a communicator, and the temporaries of it and its subgroups."""
    for _, _, memories in list(comm.registered.windows.values()):
        yield memories[comm.rank]
    for kept in list(comm.kept.values()):  # a stream's thread may add to it
        for part in list(kept.values()) if isinstance(kept, dict) else kept if isinstance(kept, tuple) else ():
            if isinstance(part, Communicator):
                yield from _kept_by(part)
            elif isinstance(part, np.ndarray | Tensor):
                yield part
