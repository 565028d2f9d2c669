"""Threads that work beside the main one, and what becomes of them as the program ends.

They are daemons, which keep no program alive. But once the main thread is through, Python ends
every daemon that comes back to it from a library, and libraries in Rust and C++, as safetensors and
torch are, take that for an error and abort the process. So a piece of work that has begun is
finished first, which may take it a second, and none is begun. What takes longer, as a rank that
computes on after another one has failed, is interrupted: it leaves where it next comes back to
Python, while Python is still there. To free what a thread was called with is such a piece, too: the
last to hold a process group is inside of torch while the group is taken down.
"""

import atexit
import ctypes
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from minidist.full.comm.report import user_line

COURTESY = 1.0  # seconds


class BackgroundThread(threading.Thread):
    """A daemon thread that does each piece of work, and frees what that held, in a `with
    thread.working():` block.
    """

    def __init__(self, target: Callable[..., None], *args: Any, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._held: Any = target, args
        self._changed = threading.Condition()
        self._works = 0  # blocks that are entered, one inside another
        self._ending = False

    def run(self) -> None:
        """Call the target. What it was called with is freed in a block of its own."""
        try:
            super().run()
        finally:
            with self.working():
                del self._held

    @contextmanager
    def working(self) -> Iterator[None]:
        """Enter a piece of work. Once the program is ending, no block is entered any more, but for
        one inside another.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._works or not self._ending)
            self._works += 1
        try:
            yield
        finally:
            with self._changed:
                self._works -= 1
                self._changed.notify_all()

    def finish(self, patience: float) -> bool:
        """Wait so many seconds for the piece of work that has begun, and let no other begin.

        Returns whether it is finished.
        """
        with self._changed:
            self._ending = True
            return self._changed.wait_for(lambda: not self._works, patience)

    def interrupt(self) -> None:
        """Raise SystemExit in the thread where it next runs a line of Python: nobody hears of it."""
        assert self.ident is not None, "what works has been started"
        leave = ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), leave)


class WorkingThread(BackgroundThread):
    """A daemon thread whose whole run is one piece of work."""

    def run(self) -> None:
        """Call the target, and free what it was called with."""
        with self.working():
            super().run()


def end(threads: list[BackgroundThread]) -> None:
    """Give threads of a job that has ended a second to come to their end, interrupt those that have
    not, and warn of those that do not heed it.
    """
    late = _alive(threads, COURTESY)
    for thread in late:
        thread.interrupt()
    if late := _alive(late, COURTESY / 2):
        frames = sys._current_frames()
        names = sorted(f"{each.name}{user_line(frames.get(each.ident or 0))}" for each in late)
        warnings.warn(
            f"{', '.join(names)}: computes on although its job has ended, where nothing can "
            "interrupt it. Later jobs of this process may meet what it changes for all of the "
            "process, such as torch's modes: start Python anew to be safe",
            RuntimeWarning,
            stacklevel=2,
        )


def _alive(threads: list[BackgroundThread], patience: float) -> list[BackgroundThread]:
    """Give all of them so many seconds to come to their end, and return those that have not."""
    deadline = time.monotonic() + patience
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


@atexit.register
def _let_finish() -> None:
    threads = [each for each in threading.enumerate() if isinstance(each, BackgroundThread)]
    late = _still_working(threads)
    for thread in late:
        thread.interrupt()
    _still_working(late)


def _still_working(threads: list[BackgroundThread]) -> list[BackgroundThread]:
    """Give all of them a second to finish what they do, and return those that have not."""
    deadline = time.monotonic() + COURTESY
    return [each for each in threads if not each.finish(max(0.0, deadline - time.monotonic()))]
