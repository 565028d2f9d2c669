"""The end of a backward: when autograd calls back, and whether an earlier one never got there."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class BackwardEnd:
    """Calls `work` once each time a backward has ended in which `expect` was called."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.broken = False  # an earlier backward raised on its way
        self._pending: weakref.ref[Callable[[], None]] | None = None

    def expect(self) -> bool:
        """Have the backward that is running call back. Tell whether this was its first such request."""
        if self._pending is not None and self._pending() is not None:
            return False
        self.broken = self._pending is not None

        def end() -> None:
            self._pending = None
            self.work()

        # Autograd alone keeps this callback, and drops it also if backward raises: a dead reference tells.
        self._pending = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return True
