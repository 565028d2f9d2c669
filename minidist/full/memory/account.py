"""The account: how many bytes a rank holds, for what, and when.

    activations     ▁▂▃▄▅▆▇█▇▆▅▄▃▂▁             what autograd saved for backward
    gradients                ▁▂▃▄▅▆▇█████▁
    optimizer                        ▁████      from the first step on
    parameters      ██████████████████████
                    ├ forward ┤ backward ┤ step

    account.watch(model, optimizer)
    with account.recording():
        loss = cross_entropy_sum(model(tokens), targets)
        loss.backward()
        optimizer.step()
    print(account.peaks)

The account counts storages at their present size, not tensors and not the process's pages. Views
share a storage, and one resized to 0 holds nothing. A storage on the device `meta` has a size too,
so a modelled cluster has an account. Each storage counts *once*, in the first category that claims
it: what holders report, parameters (with the model's buffers), gradients, optimizer, communication,
activations. A piece of registered memory is one storage.

Tensors that a checkpoint recomputes, ours or torch's, count as activations while they exist. The
account does not see an operation's own temporaries, gradients on their way, or what inner
saved-tensor hooks keep from forward.

Cost: a sample visits all tensors, about a microsecond each, and autograd causes two samples for
each tensor that it saves: 0.3 s a step for 4 layers, and four times as much for twice the layers.
Every operation passes through Python.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minidist.full.comm import Communicator
from minidist.full.comm.buffers import Buffer, address

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "communication")

Timeline: TypeAlias = list[tuple[float, dict[str, int]]]
"""Samples: the time in seconds, and the bytes held by category from then on."""


@runtime_checkable
class Holder(Protocol):
    """A strategy, around a model or an optimizer, that reports the purpose of its memory."""

    def held(self) -> Mapping[str, Iterable[Buffer]]:
        """Return tensors or arrays by category; each counts there, whatever else it is."""
        ...


class Account:
    """The bytes of one rank.

    Parameters
    ----------
    comm : Communicator, optional
        Its clock dates the samples, its trace gets an event for each of them, and its memory is
        watched.

    Attributes
    ----------
    timeline : Timeline
        The samples that differ from the one before.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self.comm = comm
        self.timeline: Timeline = []
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.holders: list[Holder] = []
        self.comms: list[Communicator] = [] if comm is None else [comm]
        # of the models, while a recording lasts: to find them takes long
        self.modules: list[nn.Module] = []
        self.saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.recomputed: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def watch(
        self,
        model: nn.Module | None = None,
        optimizer: object = None,
        comm: Communicator | None = None,
    ) -> None:
        """Count these too: a model as it is trained, wrapped in its strategies, and an `Optimizer`
        or a `Holder`.
        """
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
        """Sample whenever autograd saves or uses a tensor, around each module, and after each step.

        Meanwhile autograd does not notice when a saved tensor is changed in place: saved-tensor
        hooks disable that.
        """
        self.sample()
        with ExitStack() as hooks:
            self.modules = self._modules()
            hooks.callback(self.modules.clear)
            for module in self.modules:
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
            If a holder names an unknown category.
        """
        registered = [
            window for comm in self.comms for window in list(comm.registered.windows.values())
        ]
        windows = sorted((start, bytes) for start, bytes, _ in registered)
        begins = [start for start, _ in windows]
        counted: set[int] = set()
        held = dict.fromkeys(CATEGORIES, 0)
        for category, buffers in self._claims():
            if category not in held:
                raise ValueError(
                    f"held() names the category {category!r}: there are {', '.join(CATEGORIES)}"
                )
            for buffer in buffers:
                start, bytes = _storage(buffer)
                if (
                    windows
                    and (before := bisect_right(begins, start))
                    and start < sum(windows[before - 1])
                ):
                    start, bytes = windows[before - 1]  # a view of registered memory
                if start not in counted:
                    counted.add(start)
                    held[category] += bytes
        if not self.timeline or held != self.timeline[-1][1]:
            now = time.perf_counter() if self.comm is None else self.comm.clock()
            self.timeline.append((now, held))
            if self.comm is not None and self.comm.trace is not None:
                self.comm.trace.held(self.comm.members[self.comm.rank], now, total(held))
        return held

    @property
    def now(self) -> dict[str, int]:
        """Bytes by category at the last sample."""
        return self.timeline[-1][1] if self.timeline else dict.fromkeys(CATEGORIES, 0)

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category at the moment of the largest total."""
        return max((held for _, held in self.timeline), key=total, default=self.now)

    @property
    def peaks(self) -> dict[str, int]:
        """The largest bytes of each category, each at its own moment."""
        return {
            name: max((held[name] for _, held in self.timeline), default=0) for name in CATEGORIES
        }

    # ---------------------------------------------------------------- what is held

    def _claims(self) -> Iterator[tuple[str, Iterable[Buffer | torch.UntypedStorage]]]:
        """Yield buffers with their category. Of two claims to one storage, the first counts."""
        for holder in self.holders:
            yield from holder.held().items()
        modules = self.modules or self._modules()
        parameters = [p for module in modules for p in module._parameters.values() if p is not None]
        yield "parameters", parameters
        yield (
            "parameters",
            (b for module in modules for b in module._buffers.values() if b is not None),
        )
        # Parameters that no model has belong to the optimizer: the master weights of mixed
        # precision.
        masters = [
            p
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        yield "gradients", (p._grad for p in (*parameters, *masters) if p._grad is not None)
        yield "optimizer", masters
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        yield (
            "optimizer",
            (value for state in states for value in state.values() if isinstance(value, Tensor)),
        )
        yield "communication", (buffer for comm in self.comms for buffer in _kept_by(comm))
        yield "activations", (saved.tensor for saved in self.saved)
        yield "activations", self.recomputed

    def _modules(self) -> list[nn.Module]:
        return [module for model in self.models for module in model.modules()]

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
    """Stands for a saved tensor: autograd keeps this object instead, and drops it when it would
    drop the tensor.

    It holds the tensor without its graph: an operation that saves its own output would otherwise
    keep itself alive.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class SecondForward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds recomputation: adds the storages that a forward within backward makes to `made`; then
    calls `ended`.

    Saved-tensor hooks cannot do this: a checkpoint's own hooks hide what it recomputes from the
    hooks around them. `made` holds weak references, so that nothing is kept alive.
    """

    def __init__(
        self, made: weakref.WeakSet[torch.UntypedStorage], ended: Callable[[], object]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made, self.ended, self.inside = made, ended, False

    def __torch_dispatch__(
        self, function: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        """Run an operation. Within backward, enabled gradients mean that a forward runs."""
        before, self.inside = (
            self.inside,
            torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1,
        )
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


def _storage(buffer: Buffer | torch.UntypedStorage) -> tuple[int, int]:
    """Return the address of a buffer's storage (a unique number, if it is meta), and its bytes."""
    storage = buffer.untyped_storage() if isinstance(buffer, Tensor) else buffer
    if isinstance(storage, torch.UntypedStorage):
        return storage.data_ptr() or storage._cdata, storage.nbytes()
    return address(storage), storage.nbytes


def _kept_by(comm: Communicator) -> Iterator[Buffer]:
    """Yield the registered memory of a communicator, and its temporaries, those of its subgroups
    included.
    """
    for _, _, memories in list(comm.registered.windows.values()):
        yield memories[comm.rank]
    for kept in list(comm.kept.values()):  # a stream's thread may add to it
        parts: Iterable[object] = ()
        if isinstance(kept, dict):
            parts = list(kept.values())
        elif isinstance(kept, tuple):
            parts = kept
        for part in parts:
            if isinstance(part, Communicator):
                yield from _kept_by(part)
            elif isinstance(part, np.ndarray | Tensor):
                yield part
