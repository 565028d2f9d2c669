"""A recording: the contents of every rank's buffers after each event of a run of the real code.

    rank 0   sends ──────────── receives ─ adds ─ ...        a rank's own buffers are read at its own events, on its
    rank 1   sends ─ receives ─ adds ─ ...                   own thread; then all ranks' steps are put in one order

A number tells whose contributions are in it. Rank r contributes B^r, so a sum, written in base B,
has one digit for each rank: it says how often that rank is in the sum. Nothing is simulated a second
time: the program runs on a communicator whose wire notes each message and passes it on, and
`sys.settrace` tells which line changed a buffer in between.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.draw.observer import Observer
from minidist.draw.player import COUNTERS, Does, Meetings, Recording
from minidist.full.comm import Cluster, Communicator, DeadlockError, run
from minidist.full.comm.buffers import Array, Kind, dtype_name, flatten
from minidist.full.comm.errors import whole
from minidist.full.comm.ledger import Ledger
from minidist.full.comm.request import Span
from minidist.full.comm.stream import Job, Stream
from minidist.full.comm.wire import Request, Wire, WireAround
from minidist.full.trace.events import COLLECTIVE, COMPUTE, EventKind

MOST_RANKS = 16  # a float64 then has 3 bits for each


def record(
    program: "Callable[[Watching], object]",
    ranks: int,
    cluster: Cluster | None = None,
    formulas: Mapping[str, str] | None = None,
    meetings: Meetings | None = None,
    torch: bool = False,
) -> Recording:
    """Call `program(comm)` on simulated ranks and return what happened, up to a deadlock if it
    comes to one.

        def program(comm):
            buffer = comm.watch("buffer", np.full(8, comm.contribution), cells=comm.size)
            all_reduce(buffer, comm, algorithm="ring")

    Parameters
    ----------
    formulas : optional
        What to print next to each counter, by its name: `messages sent`, `bytes sent`, `bytes
        held`, and on a cluster `bubble`, which is in per cent.
    meetings : optional
        Which queries and keys there are, to show whose queries have met whose keys: see
        `record_attention`.
    torch : bool
        Whether the program is one of torch.distributed, as in `minidist.run`.

    Raises
    ------
    ValueError, TypeError
        For more than 16 ranks, or none, or a formula for a counter that there is not.
    """
    if whole("ranks", ranks, least=1) > MOST_RANKS:
        raise ValueError(
            f"ranks={ranks}: a recording tells at most {MOST_RANKS} ranks' contributions apart"
        )
    if unknown := [name for name in formulas or {} if name not in COUNTERS]:
        raise ValueError(
            f"there is no counter {unknown[0]!r} for this formula: choose one of "
            f"{', '.join(COUNTERS)}"
        )
    if torch:
        from minidist.torch_backend import simulated

        anyone: Any = program
        program = simulated(anyone)
    moments: dict[str, int] = {}
    observers = [
        Observer(rank, ranks, cluster is not None, moments, meetings or Meetings())
        for rank in range(ranks)
    ]

    def observed(comm: Communicator) -> None:
        observer, before = observers[comm.rank], sys.gettrace()
        watching = observer.comm = Watching(
            _WatchedWire(comm.wire, observer), comm.ledger.of_group(), observer
        )
        observer.root = sys._getframe().f_code
        sys.settrace(observer.follow)
        try:
            program(watching)
        finally:
            sys.settrace(before)

    deadlock, before = "", sys.gettrace()
    # where ranks take turns on one thread, Python must be traced already as they begin to be
    sys.settrace(before or _unseen)
    try:
        run(observed, ranks, cluster=cluster)
    except DeadlockError as error:
        deadlock = str(error)
    finally:
        sys.settrace(before)
    waiting = [each.waiting for each in observers if deadlock and each.waiting is not None]
    steps = [step for each in observers for step in each.steps]
    # the same in every run of a program
    steps.sort(key=lambda step: (step.seconds, step.moment, step.rank))
    start, computes = tuple(each.start for each in observers), any(each.busy for each in observers)
    return Recording(
        start, (*steps, *waiting), dict(formulas or {}), deadlock, computes, meetings or Meetings()
    )


def _unseen(*call: object) -> None:
    """Follow no call."""


# ---------------------------------------------------------------- a rank's side


class Watching(Communicator):
    """The communicator of a recorded program. It shows buffers; its wire shows messages."""

    def __init__(self, wire: Wire, ledger: Ledger, observer: Observer) -> None:
        super().__init__(wire, ledger)
        self.observer = observer

    @property
    def contribution(self) -> np.int64:
        """The number that stands for one contribution of this rank: fill its buffers with it."""
        # numpy makes an array of 64 bits of it everywhere; of a plain int, one of 32 in a browser
        return np.int64(1 << self.observer.bits * self.observer.rank)

    def watch(self, name: str, buffer: Kind, cells: int = 1, variable: str = "") -> Kind:
        """Show `buffer`, an int64 or float64 array, from now on, cut into cells by
        `numpy.array_split`. Return it.

        With `variable`, the name of a local variable such as `block` or `mine.output`, the buffer
        shows the tensor of that variable, whenever a line runs in a function of an algorithm or of
        the program that has the variable.
        """
        array = flatten(buffer)
        if dtype_name(array) not in ("int64", "float64"):
            raise TypeError(
                f"{name!r} is {dtype_name(array)}: contributions can be read off int64 and "
                "float64 only"
            )
        self.observer.watch(name, array, whole("cells", cells, least=1), variable)
        return buffer

    seen = True  # by the observer: spans are steps of the recording

    def span(
        self, name: str, kind: EventKind = COMPUTE, bytes: int = 0, engine_bytes: int | None = None
    ) -> Span:
        return _WatchedSpan(self, name, kind, bytes, engine_bytes)

    def split(self, color: int, key: int | None = None) -> "Watching":
        part = super().split(color, key)
        return Watching(part.wire, part.ledger, self.observer)

    def subgroup(self, ranks: Sequence[int], name: str) -> "Watching":
        part = super().subgroup(ranks, name)
        return Watching(part.wire, part.ledger, self.observer)

    def stream(self) -> Stream[Communicator]:  # type: ignore[override]
        """Return a stream that does its work as soon as it is launched: a recording follows one
        thread of each rank.
        """
        if self.observer.timed:
            raise ValueError(
                "a recording shows no overlap: record a program with streams without a cluster"
            )
        return _AtOnce(self)

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self.observer.busy += seconds


@dataclass
class _AtOnce(Stream[Communicator]):
    """A stream without a thread: it works when it is launched."""

    comm: Communicator

    def launch(self, work: Callable[..., Any], *args: Any) -> Job[Communicator]:
        job = Job(self.comm, self.comm, work, args)
        job.run()
        return job


class _WatchedWire(WireAround):
    """A wire that has an observer note each message, and passes it on."""

    def __init__(self, inner: Wire, observer: Observer) -> None:
        super().__init__(inner)
        self.observer, self.posted = observer, Counter[tuple[str, int, int, int]]()

    def isend(self, array: Array, to: int, tag: int) -> Request:
        receiver = self.members[to]
        # before it can be received
        self.observer.sent(array, receiver, self._message("send", self.rank, to, tag))
        return _Watched(
            self.inner.isend(array, to, tag), self.observer, "send to", receiver, lambda: None
        )

    def irecv(self, array: Array, source: int, tag: int) -> Request:
        observer, sender = self.observer, self.members[source]
        message = self._message("receive", source, self.rank, tag)
        observer.expect(array)
        request = self.inner.irecv(array, source, tag)
        return _Watched(
            request,
            observer,
            "receive from",
            sender,
            lambda: observer.received(array, sender, message),
        )

    def _message(self, kind: str, source: int, to: int, tag: int) -> str:
        """Name a message when one end of it is posted.

        Both ends count alike, so they give it the same name.
        """
        key = (kind, source, to, tag)
        self.posted[key] += 1
        return f"{self.name}:{source}>{to}:{tag}:{self.posted[key]}"

    def exchange(self, leaving: Array, to: int, arriving: Array, source: int, tag: int) -> None:
        Wire.exchange(self, leaving, to, arriving, source, tag)  # by the two above

    def split(self, color: int, key: int, name: str) -> Wire:
        return _WatchedWire(self.inner.split(color, key, name), self.observer)

    def among(self, ranks: list[int], name: str) -> Wire:
        return _WatchedWire(self.inner.among(ranks, name), self.observer)

    def fork(self, name: str) -> Wire:
        raise ValueError(
            "a recording follows one thread of each rank: record a program without forks"
        )

    def allocate(self, bytes: int, for_torch: bool) -> tuple[Any, list[Any]]:
        # as on machines of their own: what travels is a message
        return np.zeros(bytes, np.uint8), []


class _WatchedSpan(Span):
    """A span. If it is a collective, its beginning and its end are steps."""

    def __enter__(self) -> None:
        super().__enter__()
        self._note(Does.BEGINS)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if error[0] is None:
            self._note(Does.ENDS)

    def _note(self, kind: Does) -> None:
        assert isinstance(self.comm, Watching)
        if self.kind == COLLECTIVE:
            self.comm.observer.note(kind, f"{kind} {self.name}")


@dataclass
class _Watched:
    """A request that says what its rank waits for, and when the message has come."""

    request: Request
    observer: Observer
    what: str
    peer: int
    done: Callable[[], None]

    def wait(self) -> None:
        self.observer.waiting = self.observer.step(
            Does.WAITS, f"waits to {self.what} rank {self.peer}", peer=self.peer
        )
        self.request.wait()
        self.observer.waiting = None
        self.done()

    def test(self) -> bool:
        if through := self.request.test():
            self.done()
        return through

    def drop(self) -> bool:
        return self.request.drop()
