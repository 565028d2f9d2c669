"""A recording: what every rank's buffers held after each event of a run of the real code.

    rank 0   sends ──────────── receives ─ adds ─ ...        a rank's own buffers are read at its own events, on its
    rank 1   sends ─ receives ─ adds ─ ...                   own thread; then all ranks' steps are put in one order

Whose contributions a number holds can be read off it: rank r brings B^r, so a sum has, in base B, a digit for each
rank, which says how often that rank is in it. Nothing is simulated a second time: the program gets a communicator that
is a wire around the wire and notes each message; `sys.settrace` tells which line changed a buffer in between.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.collectives.fast import chunks_of, cut
from minidist.comm import Cluster, Communicator, DeadlockError, run
from minidist.comm.buffers import address, dtype_name, flatten
from minidist.comm.request import Request, Span
from minidist.draw.player import (
    COUNTERS,
    Buffers,
    Cell,
    Line,
    Recording,
    Step,
    changes,
    contents,
    followed,
    in_order,
    line_of,
    words,
)

if TYPE_CHECKING:
    from minidist.comm.buffers import Array

MOST_RANKS = 16  # a float64 then has 3 bits for each


def record(
    program: Callable[[Watching], object],
    ranks: int,
    cluster: Cluster | None = None,
    formulas: Mapping[str, str] | None = None,
) -> Recording:
    """Call `program(comm)` on simulated ranks and return what happened, up to a deadlock if it comes to one.

        def program(comm):
            buffer = comm.watch("buffer", np.full(8, comm.contribution), cells=comm.size)
            all_reduce(buffer, comm, algorithm="ring")

    Parameters
    ----------
    formulas : optional
        What to print next to a counter: `messages sent`, `bytes sent`, `bytes held`, and on a cluster `bubble`.

    Raises
    ------
    ValueError
        For more than 16 ranks, or a formula for a counter that there is not.
    """
    if ranks > MOST_RANKS:
        raise ValueError(f"ranks={ranks}: a recording tells at most {MOST_RANKS} ranks' contributions apart")
    for name in formulas or {}:
        if name not in COUNTERS:
            raise ValueError(f"there is no counter {name!r} for this formula: choose one of {', '.join(COUNTERS)}")
    observers = [_Observer(rank, ranks, cluster is not None) for rank in range(ranks)]

    def observed(comm: Communicator) -> None:
        observer, before = observers[comm.rank], sys.gettrace()
        watching = observer.comm = Watching(comm, observer)
        sys.settrace(observer.follow)
        try:
            program(watching)
        finally:
            sys.settrace(before)

    deadlock = ""
    try:
        run(observed, ranks, cluster=cluster)
    except DeadlockError as error:
        deadlock = str(error)
    waiting = [each.waiting for each in observers if deadlock and each.waiting is not None]
    start, steps = tuple(each.start for each in observers), in_order([each.steps for each in observers], waiting)
    return Recording(start, steps, dict(formulas or {}), deadlock, computes=any(each.busy for each in observers))


# ---------------------------------------------------------------- a rank's side


class Watching(Communicator):
    """A wire around a wire, which has an observer note what passes."""

    def __init__(self, inner: Communicator, observer: _Observer) -> None:
        super().__init__(inner.rank, inner.members, inner.name, inner)
        self.inner, self.observer, self.wire = inner, observer, inner.wire

    @property
    def contribution(self) -> int:
        """The number that stands for one contribution of this rank."""
        return 1 << self.observer.bits * self.observer.rank

    def watch(self, name: str, buffer: np.ndarray[Any, Any], cells: int = 1) -> np.ndarray[Any, Any]:
        """Show `buffer`, an int64 or float64 array, from now on, cut into cells by `numpy.array_split`. Return it."""
        if dtype_name(buffer) not in ("int64", "float64"):
            raise TypeError(f"{name!r} is {dtype_name(buffer)}: contributions can be read off int64 and float64 only")
        self.observer.watch(name, flatten(buffer), cells)
        return buffer

    def span(self, name: str, kind: str = "compute", bytes: int = 0, native: bool = False) -> Span:
        return _WatchedSpan(self, name, kind, bytes, native)

    def _isend(self, array: Array, to: int, tag: int) -> Request:
        request = self.inner._isend(array, to, tag)
        sender, receiver = self.members[self.rank], self.members[to]
        self.observer.sent(array, receiver, self.observer.name_message("send", self.name, sender, receiver, tag))
        return _Watched(request, self.observer, "send to", receiver, lambda: None)

    def _irecv(self, array: Array, source: int, tag: int) -> Request:
        observer, sender, receiver = self.observer, self.members[source], self.members[self.rank]
        message = observer.name_message("receive", self.name, sender, receiver, tag)
        observer.expect(array)
        request = self.inner._irecv(array, source, tag)
        return _Watched(request, observer, "receive from", sender, lambda: observer.received(array, sender, message))

    def _split(self, color: int, key: int, name: str) -> Communicator:
        return Watching(self.inner._split(color, key, name), self.observer)

    def _fork(self, name: str) -> Communicator:
        raise ValueError("a recording follows one thread of each rank: record a program without streams and forks")

    def _allocate(self, bytes: int) -> tuple[Any, list[Any]]:
        raise ValueError("a recording follows messages, not shared memory: record a program without comm.allocate")

    def roll_call(self, answer: Any) -> list[Any]:
        return self.inner.roll_call(answer)

    @property
    def node(self) -> tuple[int, ...]:
        return self.inner.node

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)

    def clock(self) -> float:
        return self.inner.clock()

    def advance(self, seconds: float) -> None:
        self.inner.advance(seconds)
        self.observer.busy += seconds


class _WatchedSpan(Span):
    """A span whose beginning and end are steps, if it is a collective."""

    def __enter__(self) -> None:
        super().__enter__()
        self._note("begins")

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if error[0] is None:
            self._note("ends")

    def _note(self, kind: str) -> None:
        assert isinstance(self.comm, Watching)
        if self.kind == "collective":
            self.comm.observer.note(kind, f"{kind} {self.name}")


@dataclass
class _Watched:
    """A request that tells when its message is through, and what its rank waits for until then."""

    request: Request
    observer: _Observer
    what: str
    peer: int
    done: Callable[[], None]

    def wait(self) -> None:
        self.observer.waiting = self.observer.step("waits", f"waits to {self.what} rank {self.peer}", peer=self.peer)
        self.request.wait()
        self.observer.waiting = None
        self.done()

    def test(self) -> bool:
        if through := self.request.test():
            self.done()
        return through


class _Observer:
    """What one rank has shown so far.

    While a receive is posted its cells are shown as they were: the sender's thread may fill them at any moment.
    """

    def __init__(self, rank: int, ranks: int, timed: bool) -> None:
        self.rank, self.ranks, self.timed, self.bits = rank, ranks, timed, min(8, 52 // ranks)
        self.comm: Watching | None = None
        self.start = Step(rank, "starts", f"rank {rank} starts", ("", 0), {}, (0,) * len(COUNTERS))
        self.waiting: Step | None = None
        self.busy = 0.0  # seconds of computing
        self.steps: list[Step] = []
        self.cells: dict[str, list[Array]] = {}
        self.shown: Buffers = {}
        self.temporaries: dict[int, str] = {}
        self.expected: list[Array] = []
        self.posted: Counter[tuple[str, str, int, int, int]] = Counter()
        self.here: Line = ("", 0)

    def note(self, kind: str, text: str, **more: Any) -> None:
        """Append a step."""
        self.steps.append(self.step(kind, text, **more))
        self.shown = self.steps[-1].buffers

    def step(self, kind: str, text: str, line: Line | None = None, **more: Any) -> Step:
        """Return what could be noted now."""
        assert self.comm is not None
        traffic, held = self.comm.traffic, sum(cell.nbytes for cells in self.cells.values() for cell in cells)
        line = line or line_of(sys._getframe(1))
        seconds = self.comm.clock() if self.timed else 0.0
        idle = round(100 * (1 - self.busy / seconds)) if seconds else 0
        counters = (traffic.messages_sent, traffic.bytes_sent, held, idle)
        return Step(self.rank, kind, f"rank {self.rank} {text}", line, self._read(), counters, seconds=seconds, **more)

    def sent(self, array: Array, peer: int, message: str) -> None:
        """Note that a message was posted."""
        text = f"sends {self._words(array)} to rank {peer}"
        self.note("sends", text, cells=self._overlapping(array), peer=peer, message=message)

    def received(self, array: Array, peer: int, message: str) -> None:
        """Note that a message is here."""
        self.expected = [each for each in self.expected if each is not array]
        text = f"receives {self._words(array)} from rank {peer}"
        self.note("receives", text, cells=self._overlapping(array), peer=peer, message=message)

    def follow(self, frame: FrameType, event: str, _: object) -> Any:
        """Note what the last line changed, before the next one runs: this is a trace function, as debuggers set one."""
        if not followed(frame):
            return None
        now = self._read()
        kind, cells = changes(now, self.shown)
        if cells:
            self.note(kind, f"{kind}: {words(cells, now, self.ranks)}", line=self.here, cells=cells)
        self.here = line_of(frame.f_back if event == "return" else frame)
        return self.follow

    def name_message(self, kind: str, group: str, sender: int, receiver: int, tag: int) -> str:
        """Name a message as one end of it is posted. Both ends count alike, so they arrive at the same name."""
        key = (kind, group, sender, receiver, tag)
        self.posted[key] += 1
        return f"{group}:{sender}>{receiver}:{tag}:{self.posted[key]}"

    def watch(self, name: str, array: Array, cells: int) -> None:
        """Show an array from now on."""
        self.cells[name] = chunks_of(array, cut(len(array), cells))
        if self.steps:
            self.note("watches", f"shows {name}")
        else:
            self.start = self.step("starts", "starts")
            self.shown = self.start.buffers

    def expect(self, array: Array) -> None:
        """Note that a receive into `array` is posted. If nothing that is shown holds it, it is a temporary."""
        shown = sum(len(self.cells[name][number]) for name, number in self._overlapping(array))
        if len(array) > shown and (not shown or address(array) in self.temporaries):
            name = self.temporaries.setdefault(address(array), f"temporary {len(self.temporaries) + 1}")
            width = max(1, len(next(iter(self.cells.values()), [array])[0]))
            self.cells[name] = chunks_of(array, cut(len(array), max(1, round(len(array) / width))))
            if len(self.shown.get(name, ())) != len(self.cells[name]):
                self.shown = self.shown | {name: ("",) * len(self.cells[name])}
        self.expected.append(array)

    def _overlapping(self, array: Array) -> tuple[Cell, ...]:
        """Return the cells that an array lies in."""
        every = ((name, number, cell) for name, cells in self.cells.items() for number, cell in enumerate(cells))
        return tuple((name, number) for name, number, cell in every if np.may_share_memory(cell, array))

    def _read(self) -> Buffers:
        """Return what all buffers hold."""
        waiting = {cell for array in self.expected for cell in self._overlapping(array)}
        return {
            name: tuple(
                self.shown[name][number] if (name, number) in waiting else contents(cell, self.ranks, self.bits)
                for number, cell in enumerate(cells)
            )
            for name, cells in self.cells.items()
        }

    def _words(self, array: Array) -> str:
        return words(self._overlapping(array), self._read(), self.ranks) or f"{array.nbytes} bytes"
