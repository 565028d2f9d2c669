"""In debug mode the dtype of a user's message travels beside it, as a note of one byte.

    isend(float32)   ── message: 32 bytes ──▶   irecv(int32)
                     ── note: float32 ──────▶   MismatchError: rank 0 sends float32 ...

MPI is given bytes. Without the note, whoever receives int32 would read a float32 of as many bytes
as another number, without a word. A note is posted together with its message, so it makes no valid
program wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minidist.full.comm.buffers import DTYPES, Array, dtype_name
from minidist.full.comm.errors import different_dtypes
from minidist.full.comm.report import TAGS, label
from minidist.full.comm.wire import Request, Wire

NOTES = 2 * TAGS  # tags of notes; users' and the package's own are below


class Noted(Request):
    """A message under way, and its note, which `check` looks at when both are through."""

    def __init__(self, message: Request, note: Request, check: Callable[[], None]) -> None:
        self.left, self.check = [message, note], check

    def wait(self) -> None:
        """Block until both are through."""
        while self.left:
            self.left[0].wait()
            del self.left[0]
        self.check()

    def test(self) -> bool:
        """Tell whether `wait` would return at once."""
        while self.left and self.left[0].test():
            del self.left[0]
        if not self.left:
            self.check()
        return not self.left


def noted(
    message: Request, carry: Callable[..., Request], wire: Wire, array: Array, peer: int, tag: int
) -> Noted:
    """Have the wire `carry` a note as it does the message; raise MismatchError if what arrives
    tells of another dtype.
    """
    own = DTYPES.index(dtype_name(array))
    note = np.array([own], np.uint8)  # which a receive overwrites

    def check() -> None:
        if note[0] != own:
            sender, receiver = wire.members[peer], wire.members[wire.rank]
            sent, expected = DTYPES[note[0]], DTYPES[own]
            raise different_dtypes(sender, sent, receiver, expected, label(tag))

    return Noted(message, carry(note, peer, NOTES + tag), check)
