"""Optimizers that would update a sharded model in vain, or wrongly, are refused when they step.

Only a step can tell: an optimizer over the parameters may have been built before they were sharded
or cut. So there is one hook on all optimizers of the process, from when the first model is sharded
or cut until the last is unwrapped or gone. All models share one hook, because torch walks through
its hooks in every step, and another thread may remove one meanwhile: with a single hook that does
no harm.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minidist.full.optimizer.elementwise import check_blocks


class Guard:
    """Calls `check` before every step of an optimizer, with the `id`s of what it updates, from when
    it is made until `remove`.
    """

    def __init__(self, check: Callable[[torch.optim.Optimizer, set[int]], None]) -> None:
        self.check = check
        GUARDS.post(self)

    def remove(self) -> None:
        """End the guard: every optimizer may step."""
        GUARDS.dismiss(self)


def guard_blocks(model: nn.Module) -> None:
    """Refuse optimizers that need whole parameters where a rank holds blocks, as long as the
    `model` exists.

    Tensor parallelism and shared-out experts leave blocks, as the parameters' records say.
    """
    guard = Guard(check_blocks)
    weakref.finalize(model, guard.remove).atexit = False


class Guards:
    """All guards, and the hook on all optimizers, which is there while there are any."""

    def __init__(self) -> None:
        # a model may be collected, and its guard removed, wherever Python is
        self.lock = threading.RLock()
        self.posted: dict[Guard, None] = {}  # in order: the first to object speaks
        self.hook: Any = None

    def post(self, guard: Guard) -> None:
        """Let a guard check every step from now on."""
        with self.lock:
            self.posted[guard] = None
            self.hook = self.hook or register_optimizer_step_pre_hook(self._before_step)

    def dismiss(self, guard: Guard) -> None:
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
