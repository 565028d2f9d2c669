"""Registered memory: where the other ranks hold what corresponds to an array of this one."""

from __future__ import annotations

from collections.abc import Sequence
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

    def peers(self, array: Array, lengths: Sequence[int] | None = None) -> list[Any] | None:
        """Return every rank's counterpart of a flat numpy view of registered memory, or None if it is not that.

        The counterparts begin where `array` does, and are as long, or as `lengths` says of each rank.
        """
        if not self.windows or not isinstance(array, np.ndarray) or array.base is None:
            return None  # what has no base owns its memory, and is no view of a window
        where = address(array)
        lengths = [len(array)] if lengths is None else lengths
        end = where + max(lengths) * array.itemsize
        for start, bytes, memories in self.windows:
            if start <= where and end <= start + bytes:
                lengths = list(lengths) * (len(memories) // len(lengths))
                ends = [where - start + length * array.itemsize for length in lengths]
                pieces = [memory[where - start : stop] for memory, stop in zip(memories, ends, strict=True)]
                return [piece.view(array.dtype) for piece in pieces]
        return None
