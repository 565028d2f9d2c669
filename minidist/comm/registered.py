"""Registered memory: where the other ranks hold what corresponds to an array of this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.comm.buffers import address

if TYPE_CHECKING:
    from minidist.comm.buffers import Array


class Registered:
    """All registered memory of one rank, and how it sees that of the others."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, int, list[Any]]] = []  # (address, bytes, every rank's memory)

    def add(self, mine: Any, everyones: list[Any]) -> None:
        """Note memory that was allocated together: `mine` is this rank's, all as bytes."""
        self.windows.append((address(mine), mine.nbytes, everyones))

    def peers(self, array: Array) -> list[Any] | None:
        """Return every rank's counterpart of a flat numpy view of registered memory, or None if it is not that."""
        if not self.windows or not isinstance(array, np.ndarray) or array.base is None:
            return None  # what has no base owns its memory, and is no view of a window
        where = address(array)
        end = where + array.nbytes
        for start, bytes, memories in self.windows:
            if start <= where and end <= start + bytes:
                inside = slice(where - start, end - start)
                return [memory[inside].view(array.dtype) for memory in memories]
        return None
