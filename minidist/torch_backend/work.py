"""What an operation returns: c10d's `Work`, and its future.

    launch ──▶ the group's stream runs it ──▶ the future has its value: who waits in C++ goes on
                                          └▶ work.wait() on the rank's own thread: callbacks run

A rank's own thread runs the callbacks, where it waits: they may then communicate, and the clock of
the rank moves to the end of the operation. Whoever waits, polls (`done`) or collects futures in
Python reaches us. C++ is out of our sight:

- DDP waits at the end of a backward pass. What was asked for its future during one is waited for
  there. A rank that has joined (`DDP.join`: it has no batch left) has no backward pass, and a static
  graph's first backward pass sends when it has ended: what they ask for its future is waited for at
  once.
- `torch.futures.collect_all` and `wait_all`, `torch.jit.wait`: `register.py` has `collecting` and
  `waiting` stand in for the C++ functions that they call.
- Futures that C++ makes of ours run their callbacks on the stream's thread. Those may compute, and
  cannot communicate.

A callback that nobody waits for runs when the rank waits for a later operation of the group, which
means that this one is done, too; at the latest when the group is destroyed.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

JOINED = DistributedDataParallel._match_all_reduce_for_bwd_pass.__code__


class Line:
    """The operations of one group, in the order in which its stream runs them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.lock = threading.Lock()  # the stream's thread and the rank's meet at a future
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
    outputs
        The tensors that are the result.
    line, place
        The group's operations, and which one this is; a message has no place among them.
    source
        Who sends a message.
    """

    def __init__(
        self, outputs: list[torch.Tensor], line: Line, place: float = math.inf, source: int = -1
    ) -> None:
        super().__init__()
        self._outputs, self._line, self.place, self._source = outputs, line, place, source
        self._finish: Callable[[], object] | None = None
        self._done: Callable[[], bool] = lambda: False
        self._arrived: list[BaseException | None] = []  # one, when the stream has run it
        self._future: Completed | None = None

    def begun(self, finish: Callable[[], object], done: Callable[[], bool]) -> Working:
        """Return itself, with what blocks until the operation is done and tells whether it is."""
        self._finish, self._done = finish, done
        return self

    def arrive(self, error: BaseException | None = None) -> None:
        """The stream's thread says that the outputs are there, or why not."""
        with self._line.lock:
            self._arrived.append(error)
            future = self._future
        if future is not None:
            future.settle(self._outputs, error)

    def wait(self, timeout: Any = None) -> bool:
        """Block until it is done. How long is the job's `limit`; torch's timeout is not used."""
        if self._finish is not None:
            self._line.complete_before(self)
        if self._finish is None:  # a callback may just have waited
            return True
        try:
            self._finish()
        except BaseException as error:
            self._settle(error)
            raise
        self._finish = None
        self._settle()
        return True

    def _settle(self, error: BaseException | None = None) -> None:
        if self._future is not None:
            self._future.settle(self._outputs, error)
            self._future.run_callbacks()

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
        if self._future is not None:
            return self._future
        future = Completed(self.wait, self.is_completed, lambda: self._line.call_back(self))
        with self._line.lock:
            self._future, arrived = future, list(self._arrived)
        if self._finish is None:
            arrived = [None]
        for error in arrived:
            future.settle(self._outputs, error)
        if self._finish is None:
            future.run_callbacks()
        elif has_joined() or backward_has_ended():
            self.wait()
        elif torch._C._current_graph_task_id() != -1:
            engine: Any = Variable._execution_engine
            engine.queue_callback(self.wait)
        return future


def has_joined() -> bool:
    """Tell whether DDP calls in place of a backward pass, on a rank that has no batch left."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not JOINED:
        frame = frame.f_back
    return frame is not None


def backward_has_ended() -> bool:
    """Tell whether a backward pass has only its callbacks left, and one of them is calling."""
    in_pass = torch._C._current_graph_task_id() != -1
    return in_pass and torch._C._current_autograd_node() is None


class Completed(Future[Any]):
    """A future whose waiter runs its callbacks.

    Parameters
    ----------
    complete
        Blocks until there is a value, and runs the callbacks.
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
        self._first = threading.Lock()
        self._callbacks: list[Callable[[Any], None]] | None = []

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """Give it its value or its error, if it has none yet. Any thread may."""
        if not self._first.acquire(blocking=False):
            return
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def run_callbacks(self) -> None:
        """Run the callbacks, on the rank's own thread."""
        callbacks, self._callbacks = self._callbacks or [], None
        for callback in callbacks:
            callback(self)

    def done(self) -> bool:
        """Tell whether the operation is done; it is completed then."""
        if self._callbacks is not None and self._ready():
            self._complete()
        return self._callbacks is None

    def wait(self) -> Any:
        if self._callbacks is not None:
            self._complete()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        following = Completed(self._complete, self._ready, self._call_back)

        def go_on(_: object) -> None:
            try:
                following.settle(callback(self))
            except Exception as error:
                following.settle(None, error)
            following.run_callbacks()

        self.add_done_callback(go_on)
        return following

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._callbacks is None:
            callback(self)
            return
        self._callbacks.append(callback)
        self._call_back()


def collecting(collect: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return torch's function that makes one future of many, for futures of ours among them."""

    def collect_all(futures: list[Any]) -> Any:
        ours = [future for future in futures if isinstance(future, Completed)]
        together = collect(futures)
        if not ours:
            return together

        def complete() -> None:
            for future in ours:
                future.wait()
            together.wait()
            whole.settle(futures)
            whole.run_callbacks()

        def call_back() -> None:
            for future in ours:
                future.add_done_callback(lambda _: go_on())

        def go_on() -> None:
            whole.done()

        whole = Completed(
            complete,
            lambda: all(future.done() for future in ours) and bool(together.done()),
            call_back,
        )
        return whole

    return collect_all


def waiting(wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return torch's function that waits for a future, for futures of ours as well."""

    def wait_for(future: Any) -> Any:
        return future.wait() if isinstance(future, Completed) else wait(future)

    return wait_for


class Holder(dist.ProcessGroup):
    """A group that returns a work, which torch then wraps in one that keeps it."""

    def __init__(self, work: Working) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.work = work

    def barrier(self, options: Any) -> Any:  # type: ignore[override]
        return self.work


def held(work: Working) -> Any:
    """Return a work for C++, which holds its own part alone: once Python's is gone, it would be a
    `Work` that knows no future.
    """
    return dist.ProcessGroup.barrier(Holder(work))


def keeping(hand_over: Callable[..., None]) -> Callable[..., None]:
    """Return a function of torch's by which C++ gets a work, so that the work stays what it is."""

    def keep(self: Any, work: Any, *args: Any) -> None:
        hand_over(self, held(work) if isinstance(work, Working) else work, *args)

    return keep
