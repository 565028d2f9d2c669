"""Optimizers that would update a sharded model in vain, or wrongly, are refused when they step.

Only a step can tell: an optimizer over the parameters may have been built before they were sharded
or cut. So there is one hook on all optimizers of the process, from when the first model is sharded
or cut until the last is unwrapped or gone. All models share one hook, because torch walks through
its hooks in every step, and another thread may remove one meanwhile: with a single hook that does
no harm.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minidist.full.memory.hooks import Hook
from minidist.full.optimizer.elementwise import check_whole, is_elementwise


class Watch:
    """What looks at every step of an optimizer, from when it is made until `remove`."""

    def __init__(self) -> None:
        GUARDS.post(self)

    def remove(self) -> None:
        """End the guard: every optimizer may step."""
        GUARDS.dismiss(self)

    def check(self, optimizer: torch.optim.Optimizer, updated: set[int]) -> None:
        """Raise ValueError if an optimizer over what has these `id`s must not step."""
        raise NotImplementedError


class Guard(Watch):
    """Knows which optimizers may step over a sharded model: those that its method `optimizer` has
    built.

    It keeps neither the model nor its parameters alive. Like a hook, it works from when it is made
    until `remove`.
    """

    def __init__(
        self, strategy: str, parameters: Iterable[nn.Parameter], slices: Iterable[nn.Parameter]
    ) -> None:
        self.strategy = strategy
        self.parameters, self.slices = frozenset(map(id, parameters)), frozenset(map(id, slices))
        self.built: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        super().__init__()

    def check(self, optimizer: torch.optim.Optimizer, updated: set[int]) -> None:
        """Raise ValueError if an optimizer over what has these `id`s must not step."""
        fault = ""
        if not self.parameters.isdisjoint(updated):
            fault = f"parameters that {self.strategy} shards, and would update them in vain"
        elif not self.slices.isdisjoint(updated) and optimizer not in self.built:
            fault = f"slices of {self.strategy} by hand, which would not hear of its steps"
        if fault:
            kind = type(optimizer).__name__
            # that of a ShardedOptimizer
            inner = type(vars(optimizer).get("local", optimizer)).__name__
            raise ValueError(
                f"this {kind} was built over {fault}: wrap it, then use model.optimizer({inner}, "
                "...)"
            )


class GuardOfBlocks(Watch):
    """Refuses optimizers that need whole parameters where a rank holds blocks.

    Tensor parallelism and shared-out experts leave blocks, as the parameters' records say. The
    guard works as long as the `model` exists.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        weakref.finalize(model, self.remove).atexit = False

    def check(self, optimizer: torch.optim.Optimizer, updated: set[int]) -> None:
        """Raise ValueError if an optimizer that is not elementwise is about to update a block."""
        if not is_elementwise(optimizer):
            for group in optimizer.param_groups:
                check_whole(type(optimizer), group["params"])


class GuardOfGradients(Watch):
    """Has a strategy look at the gradients of its `parameters` before an optimizer updates them.

    It does not keep them, or the strategy, alive.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], check: Callable[[set[int]], None]
    ) -> None:
        self.parameters, self.work = frozenset(map(id, parameters)), Hook(check)
        super().__init__()

    def check(self, optimizer: torch.optim.Optimizer, updated: set[int]) -> None:
        """Have the strategy look, if an optimizer is about to update its parameters."""
        if not self.parameters.isdisjoint(updated):
            self.work(updated)


class Guards:
    """All guards, and the hook on all optimizers, which is there while there are any."""

    def __init__(self) -> None:
        # a model may be collected, and its guard removed, wherever Python is
        self.lock = threading.RLock()
        self.posted: dict[Watch, None] = {}  # in order: the first to object speaks
        self.hook: Any = None

    def post(self, guard: Watch) -> None:
        """Let a guard check every step from now on."""
        with self.lock:
            self.posted[guard] = None
            self.hook = self.hook or register_optimizer_step_pre_hook(self._before_step)

    def dismiss(self, guard: Watch) -> None:
        """Let a guard check no more."""
        with self.lock:
            self.posted.pop(guard, None)
            if not self.posted and self.hook is not None:
                self.hook.remove()
                self.hook = None

    def check(self, optimizer: torch.optim.Optimizer, updated: set[int]) -> None:
        """Raise ValueError if an optimizer over what has these `id`s must not step."""
        for guard in tuple(self.posted):
            guard.check(optimizer, updated)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.check(
            optimizer,
            {id(parameter) for group in optimizer.param_groups for parameter in group["params"]},
        )


GUARDS = Guards()  # of the process, as torch's hooks are
