"""A queue of collectives that runs beside the main thread.

    main     backward ...... launch ─┐ ...... backward ...... handle.wait()
    stream                           └▶ all_reduce(bucket) ──▶ done

Launches run one at a time and in order (FIFO), on a communicator of their own: collectives of one
stream can never be taken for another's, and every rank runs them in the same order if every rank
launches them in the same order. The thread is a daemon and no executor: Python joins executors when
it exits, and a worker that waits for a dead rank would keep the program from ending.
"""

import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from minidist.full.comm.job.background import BackgroundThread
from minidist.full.comm.ledger import Awaited, Ranks
from minidist.full.trace.events import EventKind
from minidist.full.trace.lines import source_line

Comm = TypeVar("Comm", bound=Ranks)


class Handle(Protocol):
    """Something launched."""

    result: Any

    def wait(self) -> Any:
        """Block until it is done; return its result or raise its error."""


class Stream(Protocol[Comm]):
    """What `comm.stream()` returns on every wire. The one to read is `minidist.comm.Stream`."""

    comm: Comm

    @abstractmethod
    def launch(self, work: Callable[..., Any], *args: Any) -> Handle:
        """Run `work(*args)` after what was launched before, and return at once."""

    def wait(self) -> None:
        """Return once everything that was launched is done: also a job that is launched now."""
        self.launch(_nothing).wait()


def _nothing() -> None:
    pass


class Job(Generic[Comm]):
    """A piece of work and its outcome."""

    def __init__(self, caller: Comm, comm: Comm, work: Callable[..., Any], args: tuple[Any, ...]):
        self.caller, self.comm = caller, comm
        self.work = partial(work, *args)
        self.name = getattr(work, "__name__", type(work).__name__)
        recorded = caller.ledger.trace is not None or caller.ledger.debug
        self.line = source_line() if recorded else ""
        self.launched = self.ended = caller.clock()
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work, on the stream's thread."""
        self.comm.ledger.status.line = self.line
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error
        self.comm.ledger.status.line = ""
        del self.work  # what it holds may be large
        self.ended = self.comm.clock()
        self.done = True
        if self.error is not None:
            self.comm.fail(self.error)

    def wait(self) -> Any:
        """Block the launching thread until the work is done; its time moves to the end of the
        work.
        """
        caller = self.caller
        with caller.span(f"wait for {self.name}", EventKind.WAIT):
            what = f"the stream's {self.name}"
            with caller.ledger.status.awaiting(Awaited(what, ()), caller.clock()):
                caller.wait_until(lambda: self.done, what)
            caller.advance(max(0.0, self.ended - caller.clock()))
        if self.error is not None:
            raise self.error
        return self.result


class ThreadStream(Stream[Comm]):
    """A stream that is a thread. `comm` is what its work communicates on.

    The thread knows the jobs, and not the stream: it ends when nobody holds the stream any more and
    all jobs are done.
    """

    def __init__(self, caller: Comm) -> None:
        self.caller, self.comm = caller, caller.fork()
        self.jobs: deque[Job[Comm] | None] = deque()
        name = f"rank {caller.members[caller.rank]} stream"
        caller.start(partial(_work, caller, self.comm, self.jobs), name)
        weakref.finalize(self, _end, self.comm, self.jobs).atexit = False

    def launch(self, work: Callable[..., Any], *args: Any) -> Job[Comm]:
        """Queue `work(*args)`; it starts no earlier than the caller's clock."""
        job = Job(self.caller, self.comm, work, args)
        self.jobs.append(job)
        self.comm.wake()
        return job


def _work(caller: Comm, comm: Comm, jobs: deque[Job[Comm] | None]) -> None:
    thread = threading.current_thread()
    working = thread.working if isinstance(thread, BackgroundThread) else nullcontext
    comm.ledger.status.thread = threading.get_ident()
    while True:
        try:
            comm.wait_until(lambda: bool(jobs), "work", idle=True)
        except Exception:
            # the run is over, or has failed: whoever waits for a job hears it from its own wait
            return
        job = jobs.popleft()
        if job is None:
            return
        comm.advance(max(0.0, job.launched - comm.clock()))
        with working():
            job.run()
            del job  # and all that it holds
        caller.wake()


def _end(comm: Comm, jobs: deque[Job[Comm] | None]) -> None:
    """Make the thread end. The garbage collector may call this at any moment, so it waits for no
    lock.
    """
    jobs.append(None)
    comm.wake(blocking=False)
