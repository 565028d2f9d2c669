"""No rank waits for ever: a thread beside each rank that knows what it waits for, and asks the others.

    rank 0   waits for rank 1 ... longer than the limit ──"ask"──▶ every rank's watchdog
             ◀──"rank 1 waits 31 s: receive from rank 0 (tag 5, 8 bytes) at x.py:14"──
             prints who waits for whom, and ends the job

A rank that has waited for `GRACE` seconds asks its peer whether that one has finished: then nothing can come, and
the limit need not pass. Watchdogs talk through a mailbox of their own, so they never disturb the program's messages.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from minidist.comm.report import describe, user_line
from minidist.comm.request import Status

PERIOD = 0.2  # seconds between two looks
GRACE = 2.0  # seconds after which a waiting rank asks its peer
ANSWER = 2.0  # seconds the others have to answer
FINISHED = "has finished"


class Mailbox(Protocol):
    """Short texts between watchdogs."""

    def send(self, to: int, text: str) -> None:
        """Send, never blocking."""

    def receive(self) -> tuple[int, str] | None:
        """Return (sender, text) of a text that has come, or None."""


class Watchdog:
    """Looks after one rank of the world."""

    def __init__(
        self, mailbox: Mailbox, rank: int, size: int, statuses: list[Status], limit: float, end: Callable[[], None]
    ):
        self.mailbox, self.rank, self.size, self.limit, self.end = mailbox, rank, size, limit, end
        self.statuses = statuses
        self.finished = self.stopped = False
        self.answers: dict[int, str] = {}
        self.deferred_until = 0.0
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread."""
        self.stopped = True
        self.thread.join(5 * PERIOD)

    def state(self) -> str:
        """Say in words what this rank does now, one line per thread that waits."""
        if self.finished:
            return FINISHED
        frames = sys._current_frames()
        lines = []
        for number, status in enumerate(self.statuses):
            where, waiting = user_line(frames.get(status.thread)), status.waiting
            if waiting is not None:
                seconds = time.perf_counter() - status.since
                beside = " on a stream" if number else ""
                lines.append(f"waits {seconds:.1f} s{beside}: {_words(waiting)}{where}")
        return "; ".join(lines) or f"computes{user_line(frames.get(self.statuses[0].thread))}"

    def _watch(self) -> None:
        asked: dict[int, float] = {}
        while not self.stopped:
            time.sleep(PERIOD)
            self._read_mail()
            now = time.perf_counter()
            for number, status in enumerate(self.statuses):
                waiting, age = status.waiting, now - status.since
                if waiting is None or self.finished or now < self.deferred_until:
                    continue
                peer = waiting[1]
                if self.answers.get(peer) == FINISHED:
                    self._report(f"rank {self.rank} waits for rank {peer}, which has finished")
                elif age > self.limit + 2 * PERIOD * self.rank:  # staggered: one rank speaks for all
                    self._report(f"rank {self.rank} has waited {age:.1f} s, longer than one operation may")
                elif age > GRACE and asked.get(number) != status.since and peer != self.rank:
                    asked[number] = status.since
                    self.mailbox.send(peer, "ask")

    def _read_mail(self) -> None:
        while (mail := self.mailbox.receive()) is not None:
            sender, text = mail
            if text == "ask":
                self.mailbox.send(sender, self.state())
            elif text == "report":
                self.deferred_until = time.perf_counter() + 3 * ANSWER
                self.mailbox.send(sender, self.state())
            else:
                self.answers[sender] = text

    def _report(self, reason: str) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.answers = {self.rank: self.state()}
        for rank in others:
            self.mailbox.send(rank, "report")
        deadline = time.perf_counter() + ANSWER
        while len(self.answers) < self.size and time.perf_counter() < deadline:
            time.sleep(0.01)
            self._read_mail()
        lines = [f"minidist: {reason} (limit {self.limit:g} s). Who waits for whom:"]
        for rank in range(self.size):
            lines.append(f"  rank {rank} {self.answers.get(rank, 'does not answer: it is stopped, or gone')}")
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
        self.end()


def _words(waiting: tuple[str, int, int, int]) -> str:
    kind, peer, tag, bytes = waiting
    verb = {"send": "send to", "recv": "receive from", "exchange": "exchange, receiving from"}.get(kind, kind + " with")
    return describe(verb, peer, tag, bytes)
