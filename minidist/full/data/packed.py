"""Documents packed into rows: several in a row, as many as find room.

    one a row      a a a a a . . .        packed      a a a a a c c .      attention stays inside each document,
                   b b b b b b . .                    b b b b b b d d      and positions begin again with it
                   c c . . . . . .
                   d d . . . . . .

*Best fit, longest first*: each document goes where it leaves the least room, and to a row of its own
if there is room for it nowhere. It needs at most 11/9 of the fewest rows, and one more; documents
are mostly short beside a row, and then it leaves hardly any padding.

Cost: a search in the sorted sizes of room for each document, once before training. (Johnson et al.
1974, "Worst-case performance bounds for simple one-dimensional packing algorithms"; Krell et al.
2021, "Efficient sequence packing without cross-contamination"; Ding et al. 2024, "Fewer
truncations".)
"""

import zlib
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from minidist.full.data.tokenizers import Tokens
from minidist.full.ddp.sampler import Indices


class Rows(NamedTuple):
    """What a model is given of some samples, and what it is to predict.

    Attributes
    ----------
    inputs, targets : int64 arrays [b, width]
        Padding is token 0 in the inputs.
    documents : int64 array [b, width] or None
        Where the document of each token begins in its row; padding is one of its own. None: a row is
        one document.
    """

    inputs: Indices
    targets: Indices
    documents: Indices | None = None


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of documents, each a span of one long array of tokens. A row is a sample.

    Attributes
    ----------
    tokens : integer array
    starts, sizes : int64 arrays [number of documents]
        Document i is `tokens[starts[i] : starts[i] + sizes[i]]`. All but its last token are inputs,
        all but its first are targets.
    members : list of lists
        The documents of each row, in their order in the text.
    width : int
        The room of a row, in inputs (T).
    """

    tokens: Tokens
    starts: Indices
    sizes: Indices
    members: list[list[int]]
    width: int

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def lengths(self) -> Indices:
        """One more than the inputs of each row, as of a sample that is one span."""
        inputs = self.sizes - 1
        return np.array([1 + int(inputs[row].sum()) for row in self.members], np.int64)

    @property
    def padding(self) -> int:
        """Tokens of padding in all rows."""
        return len(self) * self.width - int((self.sizes - 1).sum())

    @property
    def saved(self) -> int:
        """Tokens of padding that there would be more if each document had a row of its own."""
        return (len(self.sizes) - len(self)) * self.width

    def filled(self, indices: Indices, width: int, ignored: int) -> Rows:
        """Return some rows, padded on the right to so many tokens; a target of padding is
        `ignored`.
        """
        shape = (len(indices), width)
        rows = Rows(np.zeros(shape, np.int64), np.full(shape, ignored), np.zeros(shape, np.int64))
        for place, row in enumerate(indices.tolist()):
            begin = 0
            for document in self.members[row]:
                start, size = int(self.starts[document]), int(self.sizes[document])
                end = begin + size - 1
                span = self.tokens[start : start + size].astype(np.int64)
                rows.inputs[place, begin:end] = span[:-1]
                rows.targets[place, begin:end] = span[1:]
                rows.documents[place, begin:end] = begin  # type: ignore[index]
                begin = end
            rows.documents[place, begin:] = begin  # type: ignore[index]
        return rows

    def words(self, T: int) -> str:
        """Say what is trained on, and what packing has saved."""
        return (
            f"{len(self.sizes):,} documents packed into {len(self):,} rows of up to {T} "
            f"tokens, with {self.padding:,} tokens of padding in place of {self.padding + self.saved:,}"
        )

    def checksum(self) -> int:
        """Return a number that differs, almost surely, if the text or its rows do."""
        number = 0
        rows = np.array([document for row in self.members for document in (*row, -1)], np.int64)
        for array in (self.tokens, self.starts, self.sizes, rows):
            number = zlib.crc32(np.ascontiguousarray(array).data, number)
        return number


def pack(sizes: Indices, width: int) -> list[list[int]]:
    """Return the documents of each row, by best fit, longest first.

    Parameters
    ----------
    sizes : int64 array
        Tokens of each document, from 1 to `width`.
    width : int
        The room of a row.
    """
    members: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(width + 1)]  # by the room that they have left
    rooms: list[int] = []  # that some row has, ascending
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        fits = bisect_left(rooms, size)
        if fits < len(rooms):
            room = rooms[fits]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del rooms[fits]
        else:
            room = width
            row = len(members)
            members.append([])
        members[row].append(document)
        left = room - size
        if left and not open_rows[left]:
            insort(rooms, left)
        open_rows[left].append(row)
    return [sorted(row) for row in members]
