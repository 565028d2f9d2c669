"""A scheduler's warning: save at the end of the step, and leave in order.

    SIGTERM, SIGUSR1 ─▶ any rank ── end of its step ─▶ all ranks save, and end with status 0

SLURM sends SIGTERM before it ends a job, or with `--signal=USR1@300` another one so many seconds
before; a cloud's spot machine is told by SIGTERM, too. Ranks hear it at different moments, so they
agree in the all-reduce of the step's loss. A second signal of the kind ends the rank at once.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

if sys.platform == "win32":  # which knows no other
    WARNINGS = (signal.SIGTERM,)
else:
    WARNINGS = (signal.SIGTERM, signal.SIGUSR1)


class Warned:
    """Whether this rank was asked to leave, and by which signal."""

    name = ""

    def __bool__(self) -> bool:
        """Tell whether it was."""
        return bool(self.name)

    def hear(self, number: int, _: FrameType | None) -> None:
        """Note a signal, and let the next one of its kind end the rank."""
        self.name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def listening() -> Iterator[Warned]:
    """Listen for warnings during the body. Ranks that are threads hear none: a process has one
    handler.
    """
    warned = Warned()
    if threading.current_thread() is not threading.main_thread():
        yield warned
        return
    before = {number: signal.signal(number, warned.hear) for number in WARNINGS}
    try:
        yield warned
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
