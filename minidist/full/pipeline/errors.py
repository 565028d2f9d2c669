"""The error of a schedule: one sentence, and a grid of the plan with the failing cell in brackets.

rank 1, word 3: 1B0 stands before 1F0, which it needs

          1     2     3     4
rank 0    0F0   0F1   0B0   0B1
rank 1    1F1   1B1  [1B0]  1F0
"""

from collections.abc import Sequence
from itertools import product
from typing import TypeAlias

COLUMNS, ROWS = 7, 12
"""How much of a large plan is printed: columns on either side of the failing cell, and rows in
all.
"""

Cell: TypeAlias = tuple[int, int]
"""A place in a plan: the rank, and the position in its list."""


class ScheduleError(ValueError):
    """A schedule that cannot be run.

    It says why, and prints the plan with the failing cells in brackets.

    Attributes
    ----------
    cells : list of Cell
        The failing cells; the sentence is about the first of them.
    """

    def __init__(
        self, sentence: str, rows: Sequence[Sequence[object]], cells: Sequence[Cell]
    ) -> None:
        super().__init__(f"{sentence}\n\n{grid(rows, cells)}" if rows else sentence)
        self.cells = list(cells)


def grid(rows: Sequence[Sequence[object]], cells: Sequence[Cell]) -> str:
    """Return the rows as a table with `cells` in brackets.

    If the plan is large, the table shows the part around the first of them.

    A cell directly after the end of a row is printed as `[?]`: the action that should be there is
    missing.
    """
    rank, column = cells[0] if cells else (0, 0)
    longest = max(map(len, rows), default=0)
    stop = min(max(longest, column + 1), column + COLUMNS + 1)
    columns = range(max(0, column - COLUMNS), stop)
    top = max(0, min(rank - ROWS // 2, len(rows) - ROWS))
    shown = set(range(top, min(top + ROWS, len(rows))))
    shown |= {row for row, _ in cells[:ROWS]}
    words: dict[Cell, str] = {}
    for row, at in product(shown, columns):
        failing = (row, at) in cells
        word = "?" if failing else ""  # beyond the end of a row
        if at < len(rows[row]):
            word = str(rows[row][at])[:20]
        words[row, at] = f"[{word}]" if failing else f" {word} "
    width = max(map(len, words.values()), default=3)
    numbers = "".join(f" {at + 1:<{width - 2}} " for at in columns)
    head = f"rank {max(shown, default=0)}"
    left = "… " if columns.start else "  "
    right = " …" if columns.stop < longest else ""
    lines = [" " * (len(head) + 3) + numbers.rstrip()]
    for row in sorted(shown):
        name = f"rank {row}"
        body = "".join(f"{words[row, at]:<{width}}" for at in columns)
        lines.append(f"{name:<{len(head)}} {left}{body}{right}".rstrip())
    return "\n".join(lines)
