"""Ctrl-C, although the main thread may be inside MPI.

Python raises KeyboardInterrupt between two of its own steps. A thread that waits inside a library takes none, and would
wait on for ever, deaf. But Python's signal handler also writes the signal's number to a pipe, if there is one, and
another thread can read that: the watchdog.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

COURTESY = 1.0  # seconds for the main thread to raise KeyboardInterrupt by itself


class Interrupt:
    """Remembers when SIGINT came. Make it in the main thread."""

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
                signal.set_wakeup_fd(before)  # an event loop's: leave it the pipe that it listens to

    def unheard(self, waits_since: float) -> bool:
        """Tell whether a Ctrl-C came that the main thread, waiting since `waits_since`, cannot have noticed."""
        with suppress(OSError):  # nothing to read
            if self._pipe is not None and signal.SIGINT in os.read(self._pipe, 4096):
                self.came = time.perf_counter()
        return self.came is not None and waits_since < self.came < time.perf_counter() - COURTESY
