"""Registered memory: where the other ranks hold what corresponds to an array of this one."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.full.comm.buffers import Buffer, address


class Registered:
    """The registered memory of one rank, and where it sees that of the others."""

    def __init__(self) -> None:
        # by address: that, bytes, every rank's memory
        self.windows: dict[int, tuple[int, int, list[Any]]] = {}

    def add(self, memory: Any, everyones: list[Any]) -> Any:
        """Register this rank's `memory`, which was allocated together with `everyones`, all as
        bytes; return it.

        It is registered until the last view of what is returned is gone. What is noted here keeps
        the others' memory.
        """
        # views of this one keep it, and not what it is a view of
        mine = np.frombuffer(memoryview(memory), np.uint8)
        start = address(mine)
        self.windows[start] = (start, mine.nbytes, everyones)
        forget = weakref.finalize(mine, self.windows.pop, start)
        forget.atexit = False
        return mine

    def peers(self, array: Buffer, lengths: Sequence[int] | None = None) -> list[Any] | None:
        """Return every rank's counterpart of a flat numpy view of registered memory; None if it is
        no such view.

        The counterparts begin where `array` does, and are as long, or as `lengths` says of each
        rank.
        """
        if not self.windows or not isinstance(array, np.ndarray) or array.base is None:
            return None  # what has no base owns its memory, and is no view of a window
        where = address(array)
        lengths = lengths or [len(array)]
        end = where + max(lengths) * array.itemsize
        for start, bytes, memories in list(self.windows.values()):  # any may be gone at any moment
            if start <= where and end <= start + bytes:
                first = where - start
                lengths = list(lengths) * (len(memories) // len(lengths))
                ends = [first + length * array.itemsize for length in lengths]
                return [
                    memory[first:end].view(array.dtype)
                    for memory, end in zip(memories, ends, strict=True)
                ]
        return None
