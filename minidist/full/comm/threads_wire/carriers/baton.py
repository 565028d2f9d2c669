"""Stacks that are threads. They pass a baton: one lock a task, on which it stands.

Whatever belongs to a thread is the rank's own, as it is with `engine="threads"`: torch's grad mode,
the queue of a backward, a user's `threading.local`. To hand over takes some five microseconds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

from minidist.full.comm.job.background import WorkingThread, end
from minidist.full.comm.threads_wire.carriers.cooperative import LOOK, Task


class Turn:
    """The stack of one task: a thread, and what it stands on."""

    def __init__(self, name: str, do: Callable[[], None]) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.thread = WorkingThread(self._begin, do, name=name)

    def _begin(self, do: Callable[[], None]) -> None:
        self.gate.acquire()
        do()


class Baton:
    """Threads of which one runs."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def start(self, task: Task, do: Callable[[], None]) -> None:
        """Start a thread that stands until it is let go on for the first time."""
        task.stack = Turn(task.name, do)
        task.stack.thread.start()

    def run(self, first: Task, look: Callable[[], bool]) -> None:
        """Hand the baton to `first`, and wait until the last one gives it back."""
        self.let(first)
        try:
            while not self.over.wait(LOOK):
                if look():
                    return
        finally:
            end([self.holder])  # all others end at their turn
            self.over.wait(LOOK)

    def let(self, task: Task | None) -> None:
        """Hand the baton on."""
        if task is None:
            self.over.set()
        else:
            self.holder: WorkingThread = task.stack.thread
            task.stack.gate.release()

    def stand(self, task: Task) -> None:
        """Wait for the baton."""
        task.stack.gate.acquire()

    def check(self, task: Task) -> None:
        """Refuse nothing: each task has a thread."""

    def holds(self, task: Task) -> bool:
        """Compare threads."""
        return task.stack is not None and threading.get_ident() == task.stack.thread.ident

    def frame(self, task: Task) -> FrameType | None:
        """Return where the thread is."""
        return sys._current_frames().get(task.stack.thread.ident or 0)
