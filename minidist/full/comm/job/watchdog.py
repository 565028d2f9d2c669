"""No rank waits for ever: a thread beside each rank that knows what it waits for, and asks the
others.

    rank 0   waits for rank 1 ... longer than the limit ──"ask"──▶ every rank's watchdog
             ◀──"rank 1 waits 31 s: receive from rank 0 (tag 5, 8 bytes) at x.py:14"──
             prints who waits for whom, and ends the job

A rank that has waited for `GRACE` seconds asks its peer whether that one has finished: then nothing
can come, and the limit need not pass. Watchdogs talk through a mailbox of their own, so they never
disturb the program's messages.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from minidist.full.comm.errors import CommunicationError
from minidist.full.comm.job.background import BackgroundThread
from minidist.full.comm.ledger import Ranks, Status
from minidist.full.comm.report import user_line

PERIOD = 0.2  # seconds between two looks
GRACE = 2.0  # seconds after which a waiting rank asks its peer
ANSWER = 2.0  # seconds the others have to answer
COURTESY = 1.0  # seconds for the main thread to raise KeyboardInterrupt by itself
FINISHED = "has finished"


@contextmanager
def arrival(limit: float) -> Iterator[None]:
    """End this process, saying why, if the body takes longer than `limit` seconds.

    For the time before there is a watchdog: MPI starts only once all ranks have, and holds Python's
    lock meanwhile. A child process can still speak. It leaves when the other end of its pipe is
    closed, by us or by our end.
    """
    reason = (
        f"minidist: after {limit:g} s not all ranks have come to minidist.init(): this one stops "
        "waiting\n"
    )
    if not hasattr(os, "fork"):
        yield
        return
    listening, open_while_waiting = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(open_while_waiting)
        if not select.select([listening], [], [], limit)[0]:
            os.write(2, reason.encode())
            os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.close(listening)
    try:
        yield
    finally:
        os.close(open_while_waiting)
        os.waitpid(child, 0)


class Mailbox(Protocol):
    """Short texts between watchdogs."""

    def send(self, to: int, text: str) -> None:
        """Send, never blocking."""

    def receive(self) -> tuple[int, str] | None:
        """Return (sender, text) of a text that has come, or None."""


class Watchdog:
    """Looks after one rank of the world."""

    def __init__(self, mailbox: Mailbox, comm: Ranks, limit: float, end: Callable[[], None]):
        self.mailbox, self.rank, self.size, self.limit, self.end = (
            mailbox,
            comm.rank,
            comm.size,
            limit,
            end,
        )
        self.statuses, self.main = comm.ledger.statuses, comm.ledger.status
        self.dropped = comm.ledger.dropped
        self.finished = self.stopped = False
        self.answers: dict[int, str] = {}
        self.deferred_until = 0.0
        self.interrupt = Interrupt()
        self.thread = BackgroundThread(self._watch, name="watchdog")
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
        for status in self._threads():
            where, waiting = user_line(frames.get(status.thread)), status.waiting
            if waiting is not None:
                seconds = time.perf_counter() - status.since
                beside = "" if status is self.main else " on a stream"
                lines.append(f"waits {seconds:.1f} s{beside}: {waiting}{where}")
        return "; ".join(lines) or f"computes{user_line(frames.get(self.main.thread))}"

    def _watch(self) -> None:
        while not self.stopped:
            time.sleep(PERIOD)
            with self.thread.working():
                self._look()

    def _look(self) -> None:
        self._read_mail()
        for _ in range(len(self.dropped)):
            request = self.dropped.pop(0)
            with suppress(CommunicationError):  # the program was warned, and waits for it no more
                if not request.test():
                    self.dropped.append(request)
        if self.interrupt.unheard(self.main.since) and self.main.waiting is not None:
            self.end()
        for status in self._threads():
            if self.finished or time.perf_counter() < self.deferred_until:
                continue
            if self._waits_long(status) and time.perf_counter() - status.asked > GRACE:
                status.asked = time.perf_counter()
                for rank in self._awaited(status):
                    self.mailbox.send(rank, "ask")

    def _threads(self) -> list[Status]:
        return [status for known in self.statuses.valuerefs() if (status := known()) is not None]

    def _waits_long(self, status: Status) -> bool:
        """Tell whether a thread has waited so long that it should ask. End the job if it waits in
        vain or too long.
        """
        if status.waiting is None or not status.waiting.ranks:
            # a stream that its own rank waits for may work as long as it likes; it says whom it
            # awaits
            return False
        gone = [rank for rank in self._awaited(status) if self.answers.get(rank) == FINISHED]
        age = time.perf_counter() - status.since
        if age > GRACE and gone:
            self._report(f"rank {self.rank} waits for rank {gone[0]}, which has finished")
        if age > self.limit + 2 * PERIOD * self.rank:  # staggered: one rank speaks for all
            self._report(f"rank {self.rank} has waited {age:.1f} s, longer than one operation may")
        return age > GRACE

    def _awaited(self, status: Status) -> list[int]:
        return (
            [rank for rank in status.waiting.ranks if rank != self.rank] if status.waiting else []
        )

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
        self.answers = {self.rank: self.state()}
        for rank in sorted({*range(self.size)} - {self.rank}):
            self.mailbox.send(rank, "report")
        deadline = time.perf_counter() + ANSWER
        while len(self.answers) < self.size and time.perf_counter() < deadline:
            time.sleep(0.01)
            self._read_mail()
        lines = [f"minidist: {reason} (limit {self.limit:g} s). Who waits for whom:"]
        gone = "does not answer: it is stopped, or gone"
        lines += [f"  rank {rank} {self.answers.get(rank, gone)}" for rank in range(self.size)]
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
        self.end()


class Interrupt:
    """Remembers when SIGINT, Ctrl-C, came, although the main thread may be inside MPI. Make it in
    the main thread.

    Python raises KeyboardInterrupt between two of its own steps. A thread that waits inside a
    library takes none, and would wait on for ever, deaf. But Python's signal handler also writes
    the signal's number to a pipe, if there is one, and another thread can read that: the watchdog.
    """

    def __init__(self) -> None:
        self.came: float | None = None
        self._pipe: int | None = None
        if os.name == "posix" and threading.current_thread() is threading.main_thread():
            listening, wakeup = os.pipe()
            os.set_blocking(listening, False)
            os.set_blocking(wakeup, False)
            before = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
            if before == -1:
                self._pipe = listening
            else:
                # an event loop's: leave it the pipe that it listens to
                signal.set_wakeup_fd(before)

    def unheard(self, waits_since: float) -> bool:
        """Tell whether a Ctrl-C came that the main thread, waiting since `waits_since`, cannot have
        noticed.
        """
        with suppress(OSError):  # nothing to read
            if self._pipe is not None and signal.SIGINT in os.read(self._pipe, 4096):
                self.came = time.perf_counter()
        return self.came is not None and waits_since < self.came < time.perf_counter() - COURTESY
