"""The sockets of gloo's groups, to cut when a rank is lost: who waits for a message then wakes.

gloo wakes a waiter when the other end of its connection is gone, and no call of torch's ends the
waiting for one that is still there: `abort` of a gloo group does nothing. So we note which sockets
belong to our groups as these are made, and shut them down. The other ends wake as well.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = Path("/dev/fd")


class Sockets:
    """The sockets that were opened in `with sockets.opening():` blocks."""

    def __init__(self) -> None:
        self.noted: set[tuple[int, int]] = set()  # descriptor, and what it stands for

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Note those that the body opens. Other threads must not open any meanwhile."""
        before = _open()
        try:
            yield
        finally:
            self.noted |= _open() - before

    def cut(self) -> None:
        """Shut down those that are still open and connected. One that listens is left alone: gloo
        would end the process.
        """
        for descriptor, _ in self.noted & _open():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as twin:
                twin.getpeername()
                twin.shutdown(socket.SHUT_RDWR)
        self.noted = set()


def _open() -> set[tuple[int, int]]:
    found = set()
    for name in os.listdir(FOLDER):
        with suppress(OSError):
            found.add((int(name), os.fstat(int(name)).st_ino))
    return found
