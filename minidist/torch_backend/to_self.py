"""Messages of a rank to itself: `isend` and `irecv` may name the rank that calls, `send` may not.

No wire carries them, and nobody else can send what a rank has not sent itself: who waits too early
hears it at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor

from minidist.full.comm.errors import DeadlockError, MismatchError


class ToSelf:
    """What a rank has sent to itself, and not yet received: by tag, in order."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()
        self._messages: dict[tuple[int, int], Tensor] = {}

    def send(self, buffer: Tensor, tag: int) -> None:
        """Keep a copy."""
        self._messages[tag, self._sent[tag]] = buffer.clone()
        self._sent[tag] += 1

    def receive(self, buffer: Tensor, tag: int) -> tuple[Callable[[], None], Callable[[], bool]]:
        """Return what fills `buffer` with the next message of this tag, and what tells whether that
        was sent.

        Raises
        ------
        DeadlockError
            By the first of the two, where it was not.
        MismatchError
            If it is of another size or dtype.
        """
        at = (tag, self._expected[tag])
        self._expected[tag] += 1

        def fill() -> None:
            if at not in self._messages:
                raise DeadlockError(
                    f"a rank waits for its own message (tag {tag}), which it has not sent: call "
                    "isend before you wait"
                )
            message = self._messages.pop(at)
            if (len(message), message.dtype) != (len(buffer), buffer.dtype):
                raise MismatchError(
                    f"a rank sends itself {len(message)} elements of {message.dtype}, and has room "
                    f"for {len(buffer)} of {buffer.dtype}: give both one size and dtype"
                )
            buffer.copy_(message)

        return fill, lambda: at in self._messages
