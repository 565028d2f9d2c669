"""The end of a backward: when autograd calls back, and whether an earlier one never got there."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from minidist.comm import Communicator


class BackwardEnd:
    """Calls `work` once each time a backward has ended in which `expect` was called."""

    def __init__(self, work: Callable[[], None], comm: Communicator) -> None:
        self.work, self.comm = work, comm
        self._pending: weakref.ref[Callable[[], None]] | None = None

    def expect(self) -> bool:
        """Have the backward that is running call back. Tell whether this was its first such request.

        Raises
        ------
        RuntimeError
            If an earlier one never came to its end.
        """
        if self._pending is not None and self._pending() is not None:
            return False
        if self._pending is not None and self.comm.size > 1:
            raise RuntimeError(
                f"an earlier backward of rank {self.comm.rank} raised before all gradients were reduced, and the other "
                "ranks wait for the rest: end the job, or have all ranks build model and strategy anew"
            )

        def end() -> None:
            self._pending = None
            self.work()

        # Autograd alone keeps this callback, and drops it also if backward raises: a dead reference tells.
        self._pending = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return True
