"""Exactly one rank runs, and it hands over only where it waits: `engine="cooperative"`.

    rank 0 runs ── recv: parks ─┐                                     ┌─▶ returns from recv
                    draw the next │ rank 2 runs ── send: wakes rank 0 ─┘ (when it is drawn)
                                  └▶

Those who may go on stand in `ready`; the next is drawn by a seed. What a program does between two
waits is never interrupted, so the interleaving is a function of the seed, and so is all that
follows from it. That nobody can go on is simply that `ready` is empty.

Nothing here is a thread. Where the calls of a rank stay while another one runs is the matter of
`Stacks`: another kind has to bring these seven functions.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from minidist.full.comm.errors import CommunicationError
from minidist.full.comm.threads_wire.carriers.carrier import Job, Waiting, Work


@dataclass(eq=False)
class Task:
    """One rank, or one stream of a rank."""

    name: str
    stack: Any = None  # where its calls are
    parked: bool = False


class Stacks(Protocol):
    """Where the calls of each task stay. Exactly one of them runs, from `run` to its end."""

    def start(self, task: Task, do: Callable[[], None]) -> None:
        """Give the task a stack, on which it will call `do()` once it is let go on."""

    def run(self, first: Task, look: Callable[[], bool]) -> None:
        """Let `first` go on, and return once `let(None)` was called, or when `look()`, which is
        asked from time to time, is true.
        """

    def let(self, task: Task | None) -> None:
        """Make the task go on as soon as the caller stands, or ends; None: `run` returns."""

    def stand(self, task: Task) -> None:
        """Return once the task, the caller's, is let go on."""

    def check(self, task: Task) -> None:
        """Refuse to leave the task's stack here, if another task would then compute wrongly."""

    def holds(self, task: Task) -> bool:
        """Tell whether the caller is on the task's stack."""

    def frame(self, task: Task) -> FrameType | None:
        """Return the task's innermost call."""


class Cooperative:
    """Carries ranks that take turns."""

    comes_back = False

    def __init__(self, stacks: Stacks, seed: int, limit: float) -> None:
        self.stacks, self.limit = stacks, limit
        self.draw = random.Random(seed).random
        # exactly one task runs, and none is interrupted
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.ready: list[Task] = []
        self.late: deque[Waiting] = deque()
        self.current = Task("nobody")
        self.tasks: dict[str, int] = {}  # names, and how many have had them
        self.turns = 0
        self.job: Job | None = None  # while it may still be closed

    # ---------------------------------------------------------------- from the first to the last

    def carry(self, works: Sequence[Work], job: Job) -> None:
        """Let the ranks take turns until all have come to their end."""
        self.job = job
        for work in works:
            self.start(work)
        self.current = self._take()
        seen, idle = -1, 0.0

        def look() -> bool:
            nonlocal seen, idle
            if self.turns != seen:
                seen, idle = self.turns, 0.0
            idle += LOOK
            if idle > self.limit and job.failure is None:
                job.keep_limit(self.current.name, idle, bool(self.ready))
            return job.failure is not None and idle > 1.0

        self.stacks.run(self.current, look)

    def start(self, work: Work) -> None:
        """Add a task that may go on."""
        count = self.tasks[work.name] = self.tasks.get(work.name, 0) + 1
        task = Task(work.name if count == 1 else f"{work.name} {count}")

        def do() -> None:
            try:
                if self.job is None or self.job.failure is None:  # before its first turn came
                    work.do()
            finally:
                self._leave()

        self.stacks.start(task, do)
        self.ready.append(task)

    def _leave(self) -> None:
        """Let another task go on for ever; if none can, the run is over, and is closed once."""
        if self.job is not None and not self.somebody_runs():
            self.job.prove()  # ranks may wait for what a stream has left undone
        if self.job is not None and not self.somebody_runs():
            job, self.job = self.job, None
            job.close()
        if self.somebody_runs():
            self.current = self._take()
            self.stacks.let(self.current)
        else:
            self.stacks.let(None)

    # ---------------------------------------------------------------- waiting

    def here(self) -> Task:
        """Return the task that runs, which must be the caller."""
        task = self.current
        if not self.stacks.holds(task):
            raise CommunicationError(
                "only ranks and their streams communicate on engine='cooperative', where exactly "
                "one of them runs, and this is a thread of your own: launch it on comm.stream(), "
                "or take engine='threads'"
            )
        return task

    def stands(self, lane: Waiting) -> None:
        """Do nothing: who runs is not in the queue."""

    def goes_on(self, lane: Waiting) -> None:
        """Do nothing, as it was taken out of the queue."""

    def park(self, lane: Waiting) -> None:
        """Hand over to another task until this one is woken, and drawn."""
        task: Task = lane.thread
        self.stacks.check(task)
        task.parked = True
        self._hand_over(task)

    def wake(self, lane: Waiting) -> None:
        """Put the lane's task among those who may go on."""
        task: Task | None = lane.thread
        if task is not None and task.parked:
            task.parked = False
            self.ready.append(task)

    def wake_late(self, lane: Waiting) -> None:
        """Let it go on once nobody else can: when the garbage collector comes, or Ctrl-C, is no
        function of a seed.
        """
        self.late.append(lane)

    def pause(self) -> None:
        """Stay among those who may go on, and draw."""
        if self.ready:
            task = self.here()
            self.stacks.check(task)
            self.ready.append(task)
            self._hand_over(task)

    def left(self, lane: Waiting) -> None:
        """Do nothing: a task leaves when its work returns."""

    def somebody_runs(self) -> bool:
        """Tell whether another task may go on."""
        while self.late and not self.ready:
            self.wake(self.late.popleft())
        return bool(self.ready)

    def _take(self) -> Task:
        """Draw who goes on."""
        ready = self.ready
        place = int(self.draw() * len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        return ready.pop()

    def _hand_over(self, task: Task) -> None:
        self.turns += 1
        self.somebody_runs()
        following = self.current = self._take()
        if following is not task:
            self.stacks.let(following)
            self.stacks.stand(task)

    # ---------------------------------------------------------------- for reports

    def strangers(self) -> bool:
        """Tell that there are none: other threads are refused."""
        return False

    def doing(self, lane: Waiting) -> str:
        """Tell whether the lane's task is the one that runs, or would like to."""
        if lane.thread is self.current:
            return "computes"
        return "" if lane.thread is None or lane.thread.parked else "waits for its turn"

    def frame(self, lane: Waiting) -> FrameType | None:
        """Return the innermost call of the lane's task."""
        return self.stacks.frame(lane.thread)


LOOK = 0.2  # seconds between two looks at the clock by whoever has called `run`
