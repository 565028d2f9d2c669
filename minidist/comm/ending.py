"""What threads are doing as the program ends.

Once the main thread is through, Python ends every daemon thread that comes back to it from a library. Libraries in Rust
and C++, as safetensors and torch are, take that for an error, and abort the process. So work that a thread has begun is
finished first, which may take it a second, and no other work begins.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COURTESY = 1.0  # seconds

_changed = threading.Condition()  # guards what is below
_begun = 0
_ending = False


@contextmanager
def finished_before_exit() -> Iterator[None]:
    """Do one piece of work on a daemon thread. Waits for ever if the program is about to end."""
    global _begun
    with _changed:
        _changed.wait_for(lambda: not _ending)
        _begun += 1
    try:
        yield
    finally:
        with _changed:
            _begun -= 1
            _changed.notify_all()


@atexit.register
def _let_finish() -> None:
    global _ending
    with _changed:
        _ending = True
        _changed.wait_for(lambda: _begun == 0, COURTESY)
