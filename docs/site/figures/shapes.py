"""What a figure is made of.

    Stage 1  ████████░░░███████     idle 27 %        a row: its name, blocks from left to right, a note
             forward   idle  ...                     a block: how long it is, of which kind, what it says
    ┆ 80 GB                                          a limit, where there is one

A figure has such a picture, a `State`, for each combination of what a reader can choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

IDLE = -1  # the kind of a gap


@dataclass(frozen=True)
class Block:
    """A piece of a row: its length in the figure's unit, the number of its kind, its label."""

    length: float
    kind: int = IDLE
    label: str = ""

    def as_json(self) -> list[Any]:
        """Return the shortest list that says it."""
        length = int(self.length) if self.length == int(self.length) else self.length
        if not self.label:
            return [length, self.kind]
        return [length, self.kind, int(self.label) if self.label.isdecimal() else self.label]


@dataclass(frozen=True)
class Row:
    """A line of the picture."""

    name: str
    blocks: tuple[Block, ...]
    note: str = ""


@dataclass(frozen=True)
class State:
    """The picture for one combination of choices.

    Attributes
    ----------
    said : str
        The result in a sentence.
    length : float
        Where the axis ends.
    limit : tuple, optional
        A place on the axis, and what it is.
    """

    said: str
    rows: tuple[Row, ...] = ()
    length: float = 1.0
    limit: tuple[float, str] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as it is stored."""
        rows = [
            [row.name, [block.as_json() for block in row.blocks], row.note] for row in self.rows
        ]
        said = {"said": self.said, "rows": rows, "length": self.length}
        return said | ({"limit": list(self.limit)} if self.limit else {})


@dataclass(frozen=True)
class Choice:
    """Something that a reader can choose: from a list, or along a slider."""

    name: str
    values: tuple[str, ...]
    start: str
    slider: bool = False


@dataclass(frozen=True)
class Kind:
    """What a block can be, its colour, and the colour of a label on it."""

    name: str
    colour: str
    ink: str = "#000000"


@dataclass(frozen=True)
class Figure:
    """A figure: what it asks, what can be chosen, and how a picture is made.

    Attributes
    ----------
    unit : str
        Of lengths in the table.
    digits : int
        Behind the point, in the table.
    draw : callable
        Takes a value of each choice, and runs the package.
    """

    name: str
    title: str
    question: str
    choices: tuple[Choice, ...]
    kinds: tuple[Kind, ...]
    unit: str
    draw: Callable[..., State] = field(repr=False)
    digits: int = 0

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """Yield all combinations of choices."""
        yield from product(*(choice.values for choice in self.choices))

    def head(self) -> dict[str, Any]:
        """Return what a page needs beside the states."""
        return {
            "name": self.name,
            "title": self.title,
            "question": self.question,
            "unit": self.unit,
            "digits": self.digits,
            "choices": [vars(choice) | {"values": list(choice.values)} for choice in self.choices],
            "kinds": [vars(kind) for kind in self.kinds],
        }

    def as_json(self) -> dict[str, Any]:
        """Return all that a page needs, with a state for every combination."""
        states = {"/".join(key): self.draw(*key).as_json() for key in self.combinations()}
        return self.head() | {"states": states}


def ink_on(colour: str) -> str:
    """Return black or white, whichever is read more easily on a colour: WCAG 2.2, contrast."""
    shares = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


BLUE = "#0072B2", "#ffffff"
GREEN = "#009E73", "#000000"
ORANGE = "#E69F00", "#000000"
SKY = "#56B4E9", "#000000"
PINK = "#CC79A7", "#000000"
YELLOW = "#F0E442", "#000000"
RED = "#D55E00", "#000000"
GREY = "#999999", "#000000"
"""Okabe & Ito 2008, each with the ink that can be read on it."""
PALETTE = (SKY, ORANGE, GREEN, YELLOW, PINK, BLUE, RED, GREY)
