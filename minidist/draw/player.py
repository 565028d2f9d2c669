"""The player: a recording as a page that steps through it, forward and back.

    ├──────────────●─────────────────────────────┤   34 of 68: rank 2 adds: temporary 2 holds ranks 1 + 2
    rank 1 ╮  [ 1  ][ 1  ][ 1  ][ 1  ]  [0   ][    ]        51    leaving = chunks[left]
           │                                              ▶ 53    comm.exchange(leaving, right, arriving, left)
    rank 2 ◀  [  2 ][  2 ][  2 ][  2 ]  [    ][ 12 ]      ▶ 55    combine(arriving, own, leaving)

A row is a rank. A box is a cell of one of its buffers, with a place for the contribution of each
rank. The slider counts events, not seconds. The page is one fragment of HTML
that loads nothing else: the events as JSON, where each step says only what changed on its own rank,
and the script in `player.html` that draws them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from linecache import getlines
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from minidist.full.trace.lines import file_name

Contents: TypeAlias = tuple[int, ...] | str  # how often each rank's contribution is in it; or words
Cell: TypeAlias = tuple[str, int]  # the name of a buffer and the number of the cell
Buffers: TypeAlias = dict[str, tuple[Contents, ...]]  # what the cells of each buffer hold
Line: TypeAlias = tuple[str, int]  # a file and a line number

# the buffer whose cells tell which keys each query of a rank has met
MET = "queries ↓ that met keys →"
COUNTERS = ("messages sent", "bytes sent", "bytes held", "bubble")
# Okabe & Ito 2008, told apart by the colour-blind. From the ninth rank on they repeat: the number
# in the place counts.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2", "#D55E00", "#999999")
INKS = ("#000000",) * 5 + ("#ffffff",) + ("#000000",) * 2
PLACES = 4  # side by side in a cell
# pixels
PLACE = 16
SIDE = PLACE + 2  # a query and a key
GAP, ROW_GAP = 5, 8
LEFT, TOP = 165, 26  # margins
LETTER = 7
PACKAGE = Path(__file__).parents[1]


# ---------------------------------------------------------------- what is played


class Does(StrEnum):
    """What a rank does in a step."""

    STARTS = "starts"
    WATCHES = "watches"  # shows another buffer
    BEGINS = "begins"  # a collective
    ENDS = "ends"
    SENDS = "sends"
    RECEIVES = "receives"
    ADDS = "adds"
    MEETS = "meets"  # queries and keys
    WRITES = "writes"
    WAITS = "waits"  # for ever: a deadlock


@dataclass(frozen=True)
class Step:
    """One event on one rank, and how it left that rank.

    `buffers` are all that the rank shows, `cells` those that the event read or changed. `message`
    is the same at both ends of a message. `seconds` is virtual time. `moment` is Lamport's clock: it
    is one more than at the rank's step before, and at a receive also more than at its send. (Lamport
    1978: "Time, clocks, and the ordering of events".)
    """

    rank: int
    kind: Does
    text: str
    line: Line
    buffers: Buffers
    counters: tuple[int, ...]
    cells: tuple[Cell, ...] = ()
    peer: int | None = None
    message: str = ""
    seconds: float = 0.0
    moment: int = 0


@dataclass(frozen=True)
class Meetings:
    """Which queries and keys there are, where attention is recorded.

    Attributes
    ----------
    tokens : tuple[tuple[int, ...], ...]
        The places in the sequence that each rank has.
    owners : tuple[int, ...]
        The rank that has each place.
    """

    tokens: tuple[tuple[int, ...], ...] = ()
    owners: tuple[int, ...] = ()

    def contents(self, cell: np.ndarray[Any, Any]) -> Contents:
        """Return which keys a query has met, if the cell is its output, or whose keys and values
        are in the cell.

        The key and the value of a token are its unit vector, so that what is made of them tells
        which tokens it is made of.
        """
        found = (cell.reshape(-1, len(self.owners)) != 0).any(0)
        if len(cell) == len(found):
            return tuple(map(int, found))
        return tuple(int(found[list(mine)].any()) for mine in self.tokens)

    def words(self, rank: int, met: Sequence[Contents], before: Sequence[Contents]) -> str:
        """Say which keys a rank's queries have met since `before`: `query 1 sees key 0, query 6
        sees keys 0 + 1`.
        """
        told = []
        for query, keys, old in zip(self.tokens[rank], met, before, strict=True):
            new = [str(key) for key in range(len(keys)) if keys[key] != old[key]]
            if new:
                plural = "s" if len(new) > 1 else ""
                told.append(f"query {query} sees key{plural} {' + '.join(new)}")
        return ", ".join(told)


@dataclass(frozen=True, repr=False)
class Recording:
    """A run: how the ranks started, what happened, and the deadlock that ended it, if one did."""

    start: tuple[Step, ...]
    steps: tuple[Step, ...]
    formulas: dict[str, str] = field(default_factory=dict)
    deadlock: str = ""
    computes: bool = False  # on a virtual clock; the rest of a rank's time is its bubble
    meetings: Meetings = Meetings()
    # the lines of each file that a step points at
    sources: dict[str, tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        # in the order of the first step
        sources: dict[str, tuple[str, ...]] = {}
        for step in (*self.start, *self.steps):
            file, _ = step.line
            if file not in sources:
                sources[file] = tuple(map(str.rstrip, getlines(file)))
        object.__setattr__(self, "sources", sources)

    def at(self, count: int) -> tuple[Step, ...]:
        """Return each rank's latest step among the first `count` steps of all ranks."""
        latest = list(self.start)
        for step in self.steps[:count]:
            latest[step.rank] = step
        return tuple(latest)

    def under_way(self, count: int) -> list[Step]:
        """Return the sends among the first `count` steps whose messages have not been received by
        then.
        """
        first = self.steps[:count]
        sends = [step for step in first if step.kind == Does.SENDS]
        received = {step.message for step in first if step.kind == Does.RECEIVES}
        return [step for step in sends if step.message not in received]

    @property
    def rounds(self) -> list[int]:
        """The number of steps after which each round of messages has ended.

        The last is that of all steps.

        A message's round is one more than that of the messages its sender had received by then; a
        round ends before the first message of the next is sent.
        """
        # the round of the latest message that each rank has received
        reached = [0] * len(self.start)
        sent: dict[str, int] = {}
        ends: list[int] = []
        for count, step in enumerate(self.steps):
            if step.kind == Does.SENDS:
                round = reached[step.rank] + 1
                sent[step.message] = round
                if round > len(ends) + 1:
                    ends.append(count)
            elif step.kind == Does.RECEIVES:
                round = sent.get(step.message, 0)
                reached[step.rank] = max(reached[step.rank], round)
        return [*ends, len(self.steps)]


# ---------------------------------------------------------------- what a cell holds, in words


def words(cells: Sequence[Cell], buffers: Mapping[str, Sequence[Contents]], ranks: int) -> str:
    """Return the names of cells and, if all have the same contents, those:
    `buffer[2] (ranks 0 + 1)`.
    """
    parts: dict[str, list[str]] = {}
    for name, number in cells:
        parts.setdefault(name, []).append(str(number))
    names = []
    for name, numbers in parts.items():
        all_of_it = len(numbers) == len(buffers[name])
        names.append(name if all_of_it else f"{name}[{', '.join(numbers)}]")
    said = " and ".join(names)
    found = {buffers[name][number] for name, number in cells}
    if len(found) == 1:
        said += f" ({contents_in_words(found.pop(), ranks)})"
    return said


def contents_in_words(contents: Contents, ranks: int) -> str:
    """Return the contents of a cell in words: `ranks 0 + 1`, `2 × rank 0 + 1 × rank 1`, `all
    ranks`.
    """
    if isinstance(contents, str):
        return contents or "nothing yet"
    if ranks > 1 and contents == (1,) * ranks:
        return "all ranks"
    if max(contents) > 1:
        return " + ".join(f"{count} × rank {rank}" for rank, count in enumerate(contents) if count)
    terms = [str(rank) for rank, count in enumerate(contents) if count]
    if not terms:
        return "zero"
    plural = "s" if len(terms) > 1 else ""
    return f"rank{plural} {' + '.join(terms)}"


# ---------------------------------------------------------------- the page


class Grid:
    """Where things are in the picture, in pixels: a row for each rank, a column for each buffer,
    its cells.
    """

    def __init__(self, recording: Recording, row: int = 0) -> None:
        self.ranks = len(recording.start)
        self.columns: dict[str, int] = {}  # how many cells, by name
        for step in (*recording.start, *recording.steps):
            for name, contents in step.buffers.items():
                self.columns[name] = max(self.columns.get(name, 0), len(contents))
        self.columns.pop(MET, None)
        self.cell_width = PLACE * min(self.ranks, PLACES)
        self.cell_height = (PLACE + 2) * -(-self.ranks // PLACES)
        self.row = max(row, self.cell_height + 2 * ROW_GAP)
        self.left: dict[str, int] = {}
        self.width = LEFT
        for name, cells in self.columns.items():
            self.left[name] = self.width
            needed = cells * (self.cell_width + GAP)
            self.width += max(needed, LETTER * len(name)) + 3 * GAP
        tokens = len(recording.meetings.owners)
        side = (tokens + 1) * SIDE + GAP
        self.square = self.width
        if tokens:
            self.width += max(side, LETTER * len(MET)) + 3 * GAP
        self.height = TOP + max(self.ranks * self.row, side)

    def cell(self, rank: int, name: str, number: int) -> tuple[int, int]:
        """Return the upper left corner of a cell."""
        x = self.left[name] + number * (self.cell_width + GAP)
        y = self.middle(rank) - self.cell_height // 2
        return x, y

    def pair(self, query: int, key: int) -> tuple[int, int]:
        """Return the upper left corner of a place in the square of queries and keys.

        A number -1 gives the place before the square, where the numbers stand.
        """
        x = self.square + (key + 1) * SIDE + GAP * (key >= 0)
        y = TOP + (query + 1) * SIDE + GAP * (query >= 0)
        return x, y

    def middle(self, rank: int) -> int:
        """Return the height of the middle of a rank's row."""
        return TOP + rank * self.row + self.row // 2


def player(recording: Recording) -> str:
    """Return an HTML fragment that steps through a recording, for a notebook or any page.

    It needs nothing but a browser that runs scripts: where none does, show a `filmstrip`. The same
    recording gives the same text. The arrow keys step, with Shift by a round of messages; Home and
    End go to the ends, Space plays. Screen readers are told each event.
    """
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    data = json.dumps(_data(recording), separators=(",", ":"), ensure_ascii=False)
    for mark in "<>&\u2028\u2029":  # so that no text can end the script
        data = data.replace(mark, f"\\u{ord(mark):04x}")
    count = len(recording.steps)
    label = escape(f"A run of {len(recording.start)} ranks in {count} steps")
    filled = {"{{label}}": label, "{{last}}": str(count), "{{data}}": data}
    for mark, value in filled.items():
        page = page.replace(mark, value)
    return page


def _data(recording: Recording) -> dict[str, Any]:
    """Return what the script draws. A step holds only the buffers that it changed."""
    context = 2 if len(recording.start) <= 4 else 1
    grid = Grid(recording, row=40 + 17 * (2 * context + 1))
    colours = []
    for rank in range(grid.ranks):
        colours.append([COLOURS[rank % len(COLOURS)], INKS[rank % len(INKS)]])
    shown_counters = COUNTERS[: 3 + recording.computes]
    return {
        "ranks": grid.ranks,
        "columns": [[name, cells, grid.left[name]] for name, cells in grid.columns.items()],
        "grid": {
            "cell_width": grid.cell_width,
            "cell_height": grid.cell_height,
            "row": grid.row,
            "width": grid.width,
            "place": PLACE,
            "places": PLACES,
            "gap": GAP,
            "left": LEFT,
            "top": TOP,
            "context": context,
        },
        "colours": colours,
        "sources": _sources(recording, context),
        "counters": [[name, recording.formulas.get(name, "")] for name in shown_counters],
        "square": {"name": MET, "left": grid.square} | vars(recording.meetings),
        "steps": _steps(recording),
        "rounds": recording.rounds,
        "deadlock": recording.deadlock,
    }


def _steps(recording: Recording) -> list[dict[str, Any]]:
    """Return the steps, each with the buffers that it changed.

    A buffer that is gone has no cells.
    """
    files = list(recording.sources)
    shown: list[Buffers] = [{} for _ in recording.start]
    steps = []
    for step in (*recording.start, *recording.steps):
        before = shown[step.rank]
        changed: Buffers = {}
        for name, contents in step.buffers.items():
            if before.get(name) != contents:
                changed[name] = contents
        for name in before:
            if name not in step.buffers:
                changed[name] = ()
        shown[step.rank] = step.buffers
        file, number = step.line
        said = {
            "rank": step.rank,
            "kind": step.kind,
            "text": step.text,
            "peer": step.peer,
            "message": step.message,
            "line": [files.index(file), number],
            "buffers": changed,
            "counters": step.counters,
            "cells": step.cells,
        }
        if step.seconds:
            said["seconds"] = step.seconds
        steps.append(said)
    return steps


def _sources(recording: Recording, context: int) -> list[dict[str, Any]]:
    """Return for each file the lines that a step points at, with `context` lines around them."""
    found = []
    for file, source in recording.sources.items():
        lines: dict[int, str] = {}
        for step in (*recording.start, *recording.steps):
            if step.line[0] != file:
                continue
            first = max(1, step.line[1] - context)
            last = min(len(source), step.line[1] + context)
            for number in range(first, last + 1):
                lines[number] = source[number - 1]
        found.append({"file": _short(file), "lines": dict(sorted(lines.items()))})
    return found


def _short(file: str) -> str:
    """Return what the player calls a file: its path within the package, or else what `file_name`
    gives.
    """
    path = Path(file)
    if path.is_relative_to(PACKAGE):
        return path.relative_to(PACKAGE.parent).as_posix()
    return file_name(file)
