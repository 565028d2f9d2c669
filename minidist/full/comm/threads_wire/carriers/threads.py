"""Ranks are threads, and the system decides who runs: `engine="threads"`.

Who can still act is kept up to date at each wait and each wake, so that to look costs the same
for two ranks and for a thousand. A user's own thread may use a lane, too, and end without a word:
it is asked whether it is alive.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from types import FrameType
from typing import Any

from minidist.full.comm.job.background import BackgroundThread, WorkingThread, end
from minidist.full.comm.threads_wire.carriers.carrier import Job, Waiting, Work

# seconds after which a waiting lane looks again: a thread may have ended without a word
PERIOD = 0.5


class Threads:
    """Carries each rank on a thread of its own."""

    comes_back = True

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.lock: Any = threading.RLock()
        # an OrderedDict finds one of its keys at once, however many were taken out before
        self.running: OrderedDict[threading.Thread, None] = OrderedDict()
        self.blocked: set[threading.Thread] = set()
        self.known = set(threading.enumerate())  # these were there before the ranks

    def carry(self, works: Sequence[Work], job: Job) -> None:
        """Start a thread a rank, and wait for them."""
        before = set(self.known)
        threads = [WorkingThread(work.do, name=work.name) for work in works]
        starter = self.here()  # who is about to start others may still act
        for thread in threads:
            thread.start()
            self._met(thread)
        with self.lock:
            self.running.pop(starter, None)
        try:
            for thread in threads:
                while thread.is_alive() and job.failure is None:
                    # In slices: an untimed join would not notice Ctrl-C everywhere.
                    thread.join(0.2)
        finally:
            job.close()
            ours = self.known - before  # streams, too
            end([each for each in ours if isinstance(each, BackgroundThread)])

    def start(self, work: Work) -> None:
        """Begin work on a thread that keeps no program alive."""
        BackgroundThread(work.do, name=work.name).start()

    def here(self) -> threading.Thread:
        """Return this thread, which may act from now on."""
        thread = threading.current_thread()
        self._met(thread)
        return thread

    def _met(self, thread: threading.Thread) -> None:
        with self.lock:  # another thread may be looking for one that runs
            if thread not in self.blocked and thread not in self.running:
                self.running[thread] = None
                self.known.add(thread)

    def stands(self, lane: Waiting) -> None:
        """Count the thread no longer among those that may act."""
        self.running.pop(lane.thread, None)
        self.blocked.add(lane.thread)

    def goes_on(self, lane: Waiting) -> None:
        """Count it again."""
        self.blocked.discard(lane.thread)
        self.running[lane.thread] = None

    def park(self, lane: Waiting) -> None:
        """Sleep until woken, or for half a second."""
        if lane.wakeup is None:
            lane.wakeup = threading.Condition(self.lock)
        lane.wakeup.wait(min(PERIOD, self.limit))

    def wake(self, lane: Waiting) -> None:
        """Make the lane's thread look again; it counts as running from now on."""
        self.goes_on(lane)
        if lane.wakeup is not None:
            lane.wakeup.notify_all()

    def wake_late(self, lane: Waiting) -> None:
        """The same, unless another thread holds the lock: then the lane looks again by itself."""
        if self.lock.acquire(blocking=False):
            self.wake(lane)
            self.lock.release()

    def pause(self) -> None:
        """Do nothing: the others run anyway."""

    def left(self, lane: Waiting) -> None:
        """Count the thread no longer."""
        self.running.pop(lane.thread, None)

    def somebody_runs(self) -> bool:
        """Look for a thread that is alive; those that are not are looked at once."""
        while self.running:
            thread = next(reversed(self.running))
            if thread.is_alive():
                return True
            del self.running[thread]
        return False

    def strangers(self) -> bool:
        """Look for a thread that was not there before the ranks, and has used no lane."""
        return not self.known.issuperset(threading.enumerate())

    def doing(self, lane: Waiting) -> str:
        """Tell whether the thread is alive and waits on no lane."""
        thread = lane.thread
        alive = thread is not None and thread.is_alive() and thread not in self.blocked
        return "computes" if alive else ""

    def frame(self, lane: Waiting) -> FrameType | None:
        """Return where the thread is."""
        return sys._current_frames().get(lane.thread.ident or 0)
