"""What a `World` asks of that which carries its ranks: to start one, to let it wait, to wake it.

    World    messages, clocks, the proof of a deadlock           the same on all carriers
      └─ Carrier   Threads          all ranks run at once         `threads.py`
                   Cooperative      exactly one runs at a time    `cooperative.py`
                     └─ Stacks      Baton: threads that take turns            `baton.py`
                                    Browser: stacks that a browser sets aside `browser.py`

A carrier knows no message and no clock. All that another kind of cooperative ranks has to bring is
`Stacks`: where the calls of a rank stay while another one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple, Protocol


class Work(NamedTuple):
    """What a rank or one of its streams does, and its name in reports and schedules."""

    name: str
    do: Callable[[], None]


class Waiting(Protocol):
    """A lane, as a carrier sees it: what runs it, and what wakes it."""

    thread: Any
    wakeup: Any


class Job(Protocol):
    """A world, as a carrier sees it."""

    failure: tuple[int, BaseException] | None

    def abort(self, rank: int, error: BaseException) -> None:
        """Make every lane raise."""

    def prove(self) -> None:
        """Make every lane raise if none can go on."""

    def close(self) -> None:
        """Wake every lane for the last time: the run is over."""

    def keep_limit(self, running: str, seconds: float, others: bool) -> None:
        """Fail if anybody waits that `running` has not let go on for so many seconds."""


class Carrier(Protocol):
    """What carries ranks and their streams.

    Attributes
    ----------
    lock : context manager
        Whoever looks at what ranks share holds it. `park` lets go of it.
    limit : float
        Seconds after which a lane that waits must be back, or be missed.
    comes_back : bool
        Whether a parked lane comes back by itself from time to time, to look at the clock.
    """

    lock: AbstractContextManager[Any]
    limit: float
    comes_back: bool

    def carry(self, works: Sequence[Work], job: Job) -> None:
        """Do all works, one a rank; then close the job and let what is left come to its end."""

    def start(self, work: Work) -> None:
        """Begin work beside the caller's: a stream's."""

    def here(self) -> Any:
        """Return what runs the caller, for `lane.thread`. Refuse a thread that cannot be carried."""

    def stands(self, lane: Waiting) -> None:
        """Note that the lane, the caller's, cannot go on."""

    def goes_on(self, lane: Waiting) -> None:
        """Note that the lane, the caller's, has stopped waiting."""

    def park(self, lane: Waiting) -> None:
        """Let others run until the lane is woken, or for a while."""

    def wake(self, lane: Waiting) -> None:
        """Let a parked lane look again."""

    def wake_late(self, lane: Waiting) -> None:
        """The same at a moment that no program decides, such as the garbage collector's, and from
        any thread.
        """

    def pause(self) -> None:
        """Let others run, although the caller could go on."""

    def left(self, lane: Waiting) -> None:
        """Note that a lane has come to its end."""

    def somebody_runs(self) -> bool:
        """Tell whether anybody who is not parked may still act. The cost does not depend on how
        many there are.
        """

    def strangers(self) -> bool:
        """Tell whether there is anybody who has used no lane yet, and might."""

    def doing(self, lane: Waiting) -> str:
        """Say what a lane does that may go on: `computes`, or `waits for its turn`; nothing if what
        runs it is parked, or not there.
        """

    def frame(self, lane: Waiting) -> FrameType | None:
        """Return the innermost call of what runs the lane."""
