"""In debug mode the dtype of a user's message travels beside it: MPI carries bytes, and whoever
receives int32 would read a float32 of as many bytes as another number, without a word.
"""

from __future__ import annotations

import numpy as np

from minidist.comm.buffers import DTYPES, Array, dtype_name
from minidist.comm.errors import different_dtypes
from minidist.comm.report import TAGS, label
from minidist.comm.wire import Request, Wire

NOTES = 2 * TAGS  # tags of notes; users' and the package's own are below


class Noted:
    """A message under way, and the note beside it: one byte, posted together with the message, so
    that it makes no valid program wait for ever.
    """

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
        """Note that the first of what is left is through."""
        del self.left[0]


class NotedReceive(Noted):
    """A receive, which compares the dtypes. Raises MismatchError if they differ."""

    def __init__(self, wire: Wire, array: Array, source: int, tag: int, message: Request) -> None:
        self.wire, self.source, self.tag = wire, source, tag
        self.dtype, self.noted = dtype_name(array), np.zeros(1, np.uint8)
        super().__init__(message, wire.irecv(self.noted, source, NOTES + tag))

    def take_away(self) -> None:
        super().take_away()
        if not self.left and (sent := DTYPES[self.noted[0]]) != self.dtype:
            sender, receiver = self.wire.members[self.source], self.wire.members[self.wire.rank]
            raise different_dtypes(sender, sent, receiver, self.dtype, label(self.tag))


def noted_send(wire: Wire, array: Array, to: int, tag: int, message: Request) -> Noted:
    """Return the message with its note, which tells the dtype."""
    note = np.array([DTYPES.index(dtype_name(array))], np.uint8)
    return Noted(message, wire.isend(note, to, NOTES + tag))
