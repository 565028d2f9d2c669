"""What an operation returns: c10d's `Work`, and its future.

    launch ──▶ the group's stream runs it ──▶ work.wait() on the rank's own thread
                                              └▶ the future is set, its callbacks run

A rank's own thread completes the futures, where it waits: callbacks may then communicate, and the
clock of the rank moves to the end of the operation. DDP waits in C++, out of our sight; so a future
that is asked for during a backward pass is completed at the end of it, before DDP looks. A rank that
has joined (`DDP.join`: it has no batch left) has no backward pass: its futures are completed at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

JOINED = DistributedDataParallel._match_all_reduce_for_bwd_pass.__code__


class Working(dist.Work):
    """An operation under way.

    Parameters
    ----------
    finish
        Blocks until the operation is done, and puts down what arrived.
    outputs
        The tensors that are the result.
    """

    def __init__(
        self,
        finish: Callable[[], object],
        outputs: list[torch.Tensor],
        done: Callable[[], bool],
        source: int = -1,
    ) -> None:
        super().__init__()
        self._finish: Callable[[], object] | None = finish
        self._outputs, self._done, self._source = outputs, done, source
        self._future: Completed | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Block until it is done. How long is the job's `limit`; torch's timeout is not used."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
            if self._future is not None and not self._future.done():
                self._future.set_result(self._outputs)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._finish is None or self._done()

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        """A failed operation ends the job, so that nobody can ask for its error."""

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Any:
        """Return a future of the outputs."""
        if self._future is None:
            self._future = Completed(self.wait)
            if self._finish is None:
                self._future.set_result(self._outputs)
            elif has_joined():
                self.wait()
            elif torch._C._current_graph_task_id() != -1:
                engine: Any = Variable._execution_engine
                engine.queue_callback(self.wait)
        return self._future


def has_joined() -> bool:
    """Tell whether DDP calls in place of a backward pass, on a rank that has no batch left."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not JOINED:
        frame = frame.f_back
    return frame is not None


class Completed(Future[Any]):
    """A future that its waiter completes."""

    def __init__(self, complete: Callable[[], object]) -> None:
        super().__init__()
        self._complete = complete

    def wait(self) -> Any:
        self._complete()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        following = Completed(self._complete)

        def go_on(done: Any) -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                following.set_exception(error)

        super().then(go_on)
        return following
