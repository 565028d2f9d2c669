"""One rank's part of a recording: the contents of its buffers at each of its own events."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import CodeType, FrameType
from typing import Any

import numpy as np

from minidist.draw.player import (
    COUNTERS,
    MET,
    Buffers,
    Cell,
    Contents,
    Does,
    Line,
    Meetings,
    Step,
    words,
)
from minidist.full.collectives.fast import cut
from minidist.full.comm import Communicator
from minidist.full.comm.buffers import Array, Chunks, address, flatten, is_tensor
from minidist.full.trace.lines import of_a_library

NOT_FOLLOWED = ("minidist.comm", "minidist.full.comm.", "minidist.draw.", "minidist.full.trace.")
NO_LINE: Line = ("", 0)


class Observer:
    """What one rank has shown so far.

    While a receive is posted, its cells are shown as they were before: the sender's thread may fill
    them at any moment. `moments`, which all ranks share, says when each message was sent, on
    Lamport's clock.
    """

    def __init__(
        self, rank: int, ranks: int, timed: bool, moments: dict[str, int], meetings: Meetings
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.timed = timed
        self.bits = min(8, 52 // ranks)
        self.meetings = meetings
        of_ranks = partial(contents, ranks=ranks, bits=self.bits)
        self.contents = meetings.contents if meetings.tokens else of_ranks
        self.comm: Communicator | None = None
        # what calls the program: below it no line is the program's
        self.root: CodeType | None = None
        self.start = Step(
            rank, Does.STARTS, f"rank {rank} starts", NO_LINE, {}, (0,) * len(COUNTERS)
        )
        self.waiting: Step | None = None
        self.busy = 0.0  # seconds of computing
        self.steps: list[Step] = []
        self.moments = moments
        self.moment = 0
        self.cells: dict[str, list[np.ndarray[Any, Any]]] = {}
        # what each buffer shows, if it is not the buffer itself
        self.variables: dict[str, str] = {}
        self.shown: Buffers = {}
        self.temporaries: dict[int, str] = {}
        self.expected: list[Array] = []
        self.here = NO_LINE

    def note(self, kind: Does, text: str, **more: Any) -> None:
        """Append a step."""
        self.moment += 1
        self.steps.append(self.step(kind, text, moment=self.moment, **more))
        self.shown = self.steps[-1].buffers

    def step(self, kind: Does, text: str, line: Line | None = None, **more: Any) -> Step:
        """Return the step that would be noted now."""
        assert self.comm is not None
        traffic = self.comm.traffic
        shown = sum(cell.nbytes for _, _, cell in self._every_cell())
        line = line or line_of(sys._getframe(1), self.root)
        seconds = self.comm.clock() if self.timed else 0.0
        idle = round(100 * (1 - self.busy / seconds)) if seconds else 0
        counters = (traffic.messages, traffic.bytes, shown, idle)
        return Step(
            self.rank,
            kind,
            f"rank {self.rank} {text}",
            line,
            self._read(),
            counters,
            seconds=seconds,
            **more,
        )

    def sent(self, array: Array, peer: int, message: str) -> None:
        """Note that a message is about to be posted."""
        text = f"sends {self._words(array)} to rank {peer}"
        self.note(Does.SENDS, text, cells=self._overlapping(array), peer=peer, message=message)
        self.moments[message] = self.moment

    def received(self, array: Array, peer: int, message: str) -> None:
        """Note that a message is here."""
        self.expected = [each for each in self.expected if each is not array]
        self.moment = max(self.moment, self.moments[message])
        text = f"receives {self._words(array)} from rank {peer}"
        self.note(Does.RECEIVES, text, cells=self._overlapping(array), peer=peer, message=message)

    def follow(self, frame: FrameType, event: str, _: object) -> Any:
        """Note what the last line changed, before the next one runs.

        It is a trace function, such as a debugger sets.
        """
        if not followed(frame):
            return None
        for name, variable in self.variables.items():
            self._bind(name, variable, frame)
        now = self._read()
        kind, cells = changes(now, self.shown)
        if cells:
            text = words(cells, now, self.ranks)
            if cells[0][0] == MET:
                kind = Does.MEETS
                text = self.meetings.words(self.rank, now[MET], self.shown[MET])
            self.note(kind, f"{kind}: {text}", line=self.here, cells=cells)
        self.here = line_of(frame.f_back if event == "return" else frame, self.root)
        if not self.start.line[1]:
            self.start = replace(self.start, line=self.here)
        return self.follow

    def watch(self, name: str, array: Array, cells: int, variable: str) -> None:
        """Show an array from now on, and then what the variable holds, if one is named."""
        self.cells[name] = Chunks(array, cut(len(array), cells))
        self.variables[name] = variable
        if self.steps:
            self.note(Does.WATCHES, f"shows {name}")
        else:
            self.start = self.step(Does.STARTS, "starts")
            self.shown = self.start.buffers

    def _bind(self, name: str, variable: str, frame: FrameType) -> None:
        """Let a buffer show the tensor of a variable, if this function has one.

        The tensor is then not a temporary any more.
        """
        first, _, attribute = variable.partition(".")
        value = frame.f_locals.get(first)
        if attribute:
            value = getattr(value, attribute, None)
        if is_tensor(value):
            array = flatten(value)
            chunks = cut(len(array), len(self.cells[name]))
            self.cells[name] = Chunks(array, chunks)
            temporary = self.temporaries.pop(address(array), "")
            self.cells.pop(temporary, None)

    def expect(self, array: Array) -> None:
        """Note that a receive into `array` is posted.

        An array that lies outside all shown buffers is shown as a temporary, if it has their dtype:
        counts of rows, say, are not contributions.
        """
        dtypes = {cell.dtype for _, _, cell in self._every_cell()}
        if dtypes and array.dtype not in dtypes:
            return
        shown = sum(len(self.cells[name][number]) for name, number in self._overlapping(array))
        if len(array) > shown and (not shown or address(array) in self.temporaries):
            self._show_temporary(array)
        self.expected.append(array)

    def _show_temporary(self, array: Array) -> None:
        """Show an array, in cells as wide as those of the first buffer."""
        next_name = f"temporary {len(self.temporaries) + 1}"
        name = self.temporaries.setdefault(address(array), next_name)
        first_cells = next(iter(self.cells.values()), [array])
        width = max(1, len(first_cells[0]))
        count = max(1, round(len(array) / width))
        self.cells[name] = Chunks(array, cut(len(array), count))
        cells = len(self.cells[name])
        if len(self.shown.get(name, ())) != cells:
            self.shown = self.shown | {name: ("",) * cells}

    def _every_cell(self) -> Iterator[tuple[str, int, Array]]:
        """Yield each cell, after its buffer's name and its number."""
        for name, cells in self.cells.items():
            for number, cell in enumerate(cells):
                yield name, number, cell

    def _overlapping(self, array: Array) -> tuple[Cell, ...]:
        """Return the cells that an array lies in."""
        found = []
        for name, number, cell in self._every_cell():
            if np.may_share_memory(cell, array):
                found.append((name, number))
        return tuple(found)

    def _read(self) -> Buffers:
        """Return the contents of all buffers."""
        found = {}
        for name, cells in self.cells.items():
            found[name] = [self.contents(cell) for cell in cells]
        for array in self.expected:
            for name, number in self._overlapping(array):
                found[name][number] = self.shown[name][number]
        return {name: tuple(cells) for name, cells in found.items()}

    def _words(self, array: Array) -> str:
        bytes = "1 byte" if array.nbytes == 1 else f"{array.nbytes} bytes"
        return words(self._overlapping(array), self._read(), self.ranks) or bytes


# ---------------------------------------------------------------- source lines


def line_of(frame: FrameType | None, root: CodeType | None) -> Line:
    """Return the innermost line of an algorithm or of the program, which `root` calls, or no line.

    Libraries, and the floors that carry messages, are passed over.
    """
    while frame is not None and frame.f_code is not root and not followed(frame):
        frame = frame.f_back
    if frame is None or frame.f_code is root:
        return NO_LINE
    return frame.f_code.co_filename, frame.f_lineno


def followed(frame: FrameType) -> bool:
    """Tell whether to follow the lines of this code: those of the package's algorithms and of the
    program, not those of libraries.
    """
    name: str = frame.f_globals.get("__name__", "")
    if name.startswith("minidist."):
        return not name.startswith(NOT_FOLLOWED)
    return not of_a_library(frame.f_code.co_filename)


# ---------------------------------------------------------------- what a cell holds


def contents(cell: np.ndarray[Any, Any], ranks: int, bits: int) -> Contents:
    """Return how often each rank's contribution is in a cell, as its digits of `bits` bits tell, or
    else words.
    """
    if not len(cell):
        return "empty"
    if (cell != cell[0]).any():
        return "mixed"
    value = float(cell[0])
    if not (value.is_integer() and 0 <= value < 1 << bits * ranks):
        return f"{value:.3g}"
    number = int(cell[0])
    digit = (1 << bits) - 1
    return tuple(number >> bits * rank & digit for rank in range(ranks))


def changes(new: Buffers, old: Buffers) -> tuple[Does, tuple[Cell, ...]]:
    """Return which cells differ, and what was done to them: `adds` if contributions joined others,
    else `writes`.
    """
    changed = []
    kind = Does.WRITES
    for name, cells in new.items():
        for number, after in enumerate(cells):
            before = old[name][number]
            if after == before:
                continue
            changed.append((name, number))
            if _joined(after, before):
                kind = Does.ADDS
    return kind, tuple(changed)


def _joined(new: Contents, old: Contents) -> bool:
    if isinstance(new, str) or isinstance(old, str):
        return False
    return any(old) and all(after >= before for after, before in zip(new, old, strict=True))
