"""In debug mode the dtype of a user's message travels beside it, as a note of one byte.

    isend(float32)   ── message: 32 bytes ──▶   irecv(int32)
                     ── note: float32 ──────▶   MismatchError: rank 0 sends float32 ...

MPI is given bytes. Without the note, whoever receives int32 would read a float32 of as many bytes
as another number, without a word. A note is posted together with its message, so it makes no valid
program wait for ever.
"""

from __future__ import annotations

import numpy as np

from minidist.full.comm.buffers import DTYPES, Array, dtype_name
from minidist.full.comm.errors import different_dtypes
from minidist.full.comm.report import TAGS, label
from minidist.full.comm.wire import Request, Wire

NOTES = 2 * TAGS  # tags of notes; users' and the package's own are below


class Noted(Request):
    """A message under way, and its note."""

    def __init__(self, message: Request, note: Request) -> None:
        self.left = [message, note]

    def wait(self) -> None:
        """Block until both are through."""
        while self.left:
            self.left[0].wait()
            self.take_away()

    def test(self) -> bool:
        """Tell whether `wait` would return at once."""
        while self.left and self.left[0].test():
            self.take_away()
        return not self.left

    def take_away(self) -> None:
        """Forget the first of what is left, which is through."""
        del self.left[0]


class NotedSend(Noted):
    """A message that leaves, and its note."""

    def __init__(self, message: Request, wire: Wire, array: Array, to: int, tag: int) -> None:
        dtype = DTYPES.index(dtype_name(array))
        note = np.array([dtype], np.uint8)
        leaving = wire.isend(note, to, NOTES + tag)
        super().__init__(message, leaving)


class NotedReceive(Noted):
    """A message that arrives, and its note, which is compared with what is expected."""

    def __init__(self, message: Request, wire: Wire, array: Array, source: int, tag: int) -> None:
        self.sender = wire.members[source]
        self.receiver = wire.members[wire.rank]
        self.tag = tag
        self.expected = dtype_name(array)
        self.note = np.zeros(1, np.uint8)
        arriving = wire.irecv(self.note, source, NOTES + tag)
        super().__init__(message, arriving)

    def take_away(self) -> None:
        """Forget the first of what is left; raise MismatchError if both are through, and the dtypes
        differ.
        """
        super().take_away()
        sent = DTYPES[self.note[0]]
        if not self.left and sent != self.expected:
            where = label(self.tag)
            raise different_dtypes(self.sender, sent, self.receiver, self.expected, where)
