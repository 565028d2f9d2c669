"""The course's drawing of what needs what, as a picture whose lessons are links.

01 ranks ───▶ 09 pipeline       each place of the drawing is a place of the picture: letters stay
   ▼                            where they are, and lines are drawn from the middle of a place to
02 ring all-reduce              its sides
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape

WIDE, HIGH = 6.65, 26.0  # pixels of a place
SIDES = {
    "─": "LR",
    "│": "UD",
    "┌": "RD",
    "┐": "LD",
    "└": "RU",
    "┘": "LU",
    "├": "UDR",
    "┤": "UDL",
    "┬": "LRD",
    "┴": "LRU",
    "┼": "LRUD",
    "▶": "L",
    "▼": "U",
}
ENDS = {"L": (-0.5, 0), "R": (0.5, 0), "U": (0, -0.5), "D": (0, 0.5)}
LESSON = re.compile(r"(\d\d) [A-Za-z][\w,-]*(?: [\w,-]+)*")


def as_svg(drawing: str, addresses: Mapping[str, str]) -> str:
    """Return the drawing as SVG.

    Parameters
    ----------
    addresses : mapping
        Where the link of a lesson leads, by its number.
    """
    lines = drawing.rstrip("\n").split("\n")
    width, height = max(map(len, lines)) * WIDE + 12, len(lines) * HIGH + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="course-map" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="group" '
        'aria-label="Which lesson needs which: every lesson is a link">'
    ]
    for row, line in enumerate(lines):
        parts += strokes(line, row)
    for row, line in enumerate(lines):
        parts += texts(line, row, addresses)
    return "".join([*parts, "</svg>"])


def strokes(line: str, row: int) -> Iterator[str]:
    """Yield the lines and arrows of a row."""
    for column, mark in enumerate(line):
        x, y = middle(column, row)
        for side in SIDES.get(mark, ""):
            dx, dy = ENDS[side]
            yield f'<path class="line" d="M{x:.1f} {y:.1f}l{dx * WIDE:.1f} {dy * HIGH:.1f}"/>'
        if mark == "▶":
            yield f'<path class="tip" d="M{x - 3:.1f} {y - 4:.1f}l7 4l-7 4z"/>'
        if mark == "▼":
            yield f'<path class="tip" d="M{x - 4:.1f} {y - 2:.1f}l4 7l4 -7z"/>'


def texts(line: str, row: int, addresses: Mapping[str, str]) -> Iterator[str]:
    """Yield the lessons of a row, and what it says beside them."""
    words, _, note = line.partition(":")
    for found in LESSON.finditer(words):
        x, y = middle(found.start(), row)
        wide = len(found[0]) * WIDE
        box = f'x="{x - WIDE / 2 - 4:.1f}" y="{y - 12:.1f}" width="{wide + 8:.1f}" height="24"'
        label = f'<text x="{x - WIDE / 2:.1f}" y="{y + 4:.1f}" textLength="{wide:.1f}">{found[0]}</text>'
        yield f'<a href="{escape(addresses[found[1]])}"><rect rx="4" {box}/>{label}</a>'
    if note:
        x, y = middle(len(words) + 1, row)
        yield f'<text class="note" x="{x:.1f}" y="{y + 4:.1f}">{escape(note.strip())}</text>'


def middle(column: int, row: int) -> tuple[float, float]:
    """Return the middle of a place."""
    return 6 + (column + 0.5) * WIDE, 4 + (row + 0.5) * HIGH
