"""What ranks of the `torch` wire tell each other beside their messages, through torch.distributed's
key-value store.

    watchdog of rank 0 ──"ask"──▶ queue "to 3" ──▶ watchdog of rank 3        texts
    rank 2 fails       ──▶ key "failed" ──▶ the others stop as well          failures
    each rank ends     ──▶ counter "left" ──▶ all leave together             endings

The store is a small TCP server in the launcher or in rank 0; an operation is one round trip of some
50 microseconds.
"""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from minidist.full.comm.errors import RankFailed
from minidist.full.comm.job.watchdog import Watchdog
from minidist.full.comm.report import marked_traceback, tell

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

COURTESY = 0.5  # seconds for a rank to end with an error of its own once another one has failed


class StoreMailbox:
    """Texts between watchdogs, and the end of the job."""

    def __init__(self, stores: tuple[Store, Store], rank: int, size: int):
        self.store, self.house = stores  # the second is kept: in rank 0 it may be the server itself
        self.rank, self.size = rank, size
        self.failed_since: float | None = None

    def send(self, to: int, text: str) -> None:
        """Send, never blocking."""
        with suppress(RuntimeError):
            self.store.queue_push(f"to {to}", f"{self.rank} {text}")

    def receive(self) -> tuple[int, str] | None:
        """Return (sender, text) of a text that has come, or None. End this rank if another one has
        failed.
        """
        try:
            self._follow_failure()
            key = f"to {self.rank}"
            if not self.store.queue_len(key):
                return None
            sender, _, text = self.store.queue_pop(key).decode().partition(" ")
            return int(sender), text
        except RuntimeError:  # the store's process has gone, and no news comes any more
            return None

    def failed_rank(self) -> int | None:
        """Return which rank failed first, if any did."""
        try:
            return int(self.store.get("failed")) if self.store.check(["failed"]) else None
        except RuntimeError:
            return None

    def end_job(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print the traceback, each line marked with the rank, and end this process. Set as
        `sys.excepthook`.
        """
        first = self.failed_rank()
        if first is not None and isinstance(error, RankFailed):
            self._say_why(first)
        elif kind is not KeyboardInterrupt:
            tell(marked_traceback(self.rank, error))
        self.exit()

    def exit(self) -> None:
        """Tell the others that this rank fails and end its process, status 1, though a thread of it
        may be waiting.

        torchrun then ends the others. Under a launcher that does not, they read the notice in the
        store.
        """
        with suppress(RuntimeError):
            if self.failed_rank() is None:
                self.store.set("failed", str(self.rank))
            self._await_all("gone", only_for=0, seconds=3 * COURTESY)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def leave_together(self, watchdog: Watchdog) -> None:
        """Stay, answering that this rank has finished, until all have: who waits for it then learns
        so.
        """
        watchdog.finished = True
        with suppress(RuntimeError):
            self._await_all("left")
            self._await_all("gone", only_for=0)
        watchdog.stop()

    def _await_all(
        self, counter: str, only_for: int | None = None, seconds: float = math.inf
    ) -> None:
        """Count this rank in, and wait until all are. `only_for=0`: rank 0 may house the store, so
        it goes last.
        """
        arrived, nap, deadline = self.store.add(counter, 1), 0.005, time.perf_counter() + seconds
        while (
            arrived < self.size and only_for in (None, self.rank) and time.perf_counter() < deadline
        ):
            time.sleep(nap)
            arrived, nap = self.store.add(counter, 0), min(2 * nap, 0.2)

    def _follow_failure(self) -> None:
        if (first := self.failed_rank()) is None or first == self.rank:
            return
        if self.failed_since is None:
            self.failed_since = time.perf_counter()
        elif time.perf_counter() > self.failed_since + COURTESY:
            self._say_why(first)
            self.exit()

    def _say_why(self, first: int) -> None:
        if first != self.rank:  # one rank's report ends the waiting of its other threads as well
            tell(f"[rank {self.rank}] stops, because rank {first} failed\n")
