"""What an operation returns: c10d's `Work`, and its future.

    launch ──▶ the group's stream runs it ──▶ work.wait() on the rank's own thread
                                              └▶ the future is set, its callbacks run

A rank's own thread completes the futures, where it waits: callbacks may then communicate, and the
clock of the rank moves to the end of the operation. Whoever waits, polls (`done`) or collects
futures in Python reaches us. Some wait in C++, out of our sight:

- DDP, at the end of a backward pass. A future that is asked for during one is completed there.
- `torch.futures.collect_all` and `wait_all`, `torch.jit.wait`: `register.py` has `collecting` and
  `waiting` stand in for the C++ functions that they call.

A callback that nobody waits for runs when the rank waits for a later operation of the group, which
means that this one is done, too; at the latest when the group is destroyed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future


class Line:
    """The operations of one group, in the order in which its stream runs them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._called_back: list[Working] = []

    def number(self) -> int:
        """Return the next operation's place."""
        return next(self._numbers)

    def call_back(self, work: Working) -> None:
        """Remember an operation that has callbacks."""
        self._called_back.append(work)

    def complete_before(self, work: Working) -> None:
        """Run the callbacks of what the stream runs before `work`, whose rank waits for it."""
        if work.place < math.inf:
            self._complete([other for other in self._called_back if other.place < work.place])
        self._called_back = [other for other in self._called_back if not other.is_waited_for()]

    def complete(self) -> None:
        """Wait for all operations and messages that have callbacks, and run those."""
        self._complete(self._called_back)

    def _complete(self, works: list[Working]) -> None:
        for work in sorted(works, key=lambda work: work.place):
            work.wait()  # once more costs nothing: a callback may have waited for the next


class Working(dist.Work):
    """An operation under way.

    Parameters
    ----------
    finish
        Blocks until the operation is done, and puts down what arrived.
    outputs
        The tensors that are the result.
    line, place
        The group's operations, and which one this is; a message has no place among them.
    """

    def __init__(
        self,
        finish: Callable[[], object],
        outputs: list[torch.Tensor],
        done: Callable[[], bool],
        line: Line,
        place: float = math.inf,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._finish: Callable[[], object] | None = finish
        self._outputs, self._done, self._source = outputs, done, source
        self._line, self.place = line, place
        self._future: Completed | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Block until it is done. How long is the job's `limit`; torch's timeout is not used."""
        if self._finish is not None:
            self._line.complete_before(self)
        if self._finish is None:  # a callback may just have waited
            return True
        try:
            self._finish()
        except Exception as error:
            if self._future is not None and not self._future.is_set():
                self._future.set_exception(error)
            raise
        self._finish = None
        if self._future is not None:
            self._future.set_result(self._outputs)
        return True

    def is_waited_for(self) -> bool:
        """Tell whether the rank has waited for it."""
        return self._finish is None

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
            self._future = Completed(
                self.wait, self.is_completed, lambda: self._line.call_back(self)
            )
            if self._finish is None:
                self._future.set_result(self._outputs)
            elif torch._C._current_graph_task_id() != -1:
                engine: Any = Variable._execution_engine
                engine.queue_callback(self.wait)
        return self._future


class Completed(Future[Any]):
    """A future that its waiter completes.

    Parameters
    ----------
    complete
        Blocks until this future is set.
    ready
        Tells whether `complete` would return at once.
    call_back
        Is told that somebody wants to be called back, and perhaps will not wait.
    """

    def __init__(
        self,
        complete: Callable[[], object],
        ready: Callable[[], bool],
        call_back: Callable[[], object],
    ) -> None:
        super().__init__()
        self._complete, self._ready, self._call_back = complete, ready, call_back

    def is_set(self) -> bool:
        """Tell whether it has its result, or an error."""
        return super().done()

    def done(self) -> bool:
        """Tell whether the operation is done; it is completed then."""
        if not self.is_set() and self._ready():
            self._complete()
        return self.is_set()

    def wait(self) -> Any:
        if not self.is_set():
            self._complete()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        following = Completed(self._complete, self._ready, self._call_back)

        def go_on(_: object) -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(go_on)
        return following

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if not self.is_set():
            self._call_back()
        super().add_done_callback(callback)


def collecting(collect: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return torch's function that makes one future of many, for futures of ours among them."""

    def collect_all(futures: list[Any]) -> Any:
        ours = [future for future in futures if isinstance(future, Completed)]
        if not ours:
            return collect(futures)
        together = collect(futures)
        whole = Completed(
            lambda: [future.wait() for future in ours],
            lambda: all(future.done() for future in ours) and bool(together.done()),
            lambda: [future._call_back() for future in ours],
        )

        def go_on(_: object) -> None:
            try:
                together.value()  # raises the error of one
                whole.set_result(futures)
            except Exception as error:
                whole.set_exception(error)

        together.add_done_callback(go_on)
        return whole

    return collect_all


def waiting(wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return torch's function that waits for a future, for futures of ours as well."""

    def wait_for(future: Any) -> Any:
        return future.wait() if isinstance(future, Completed) else wait(future)

    return wait_for
