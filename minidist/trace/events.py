"""One event, what belongs to it, and which line of the program it came from.

rank 0   ├── forward ──┤├── all_reduce (ring) ─────────┤
                          ├ send ┤├ send ┤  ...             events nest: a collective spans its messages
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

COMMUNICATION = ("send", "recv", "exchange", "collective", "wait")


@dataclass(frozen=True, slots=True)
class Event:
    """Something a rank did between two moments.

    `kind` is one of `compute`, `send`, `recv`, `exchange`, `collective`, `wait`, or `held` (then `bytes` is how many
    bytes the rank holds from `start` on). `flow` names a message: its send and its receive carry the same one.
    A message that was posted ahead lies beside whatever its rank did until `waited_from`, the moment it began to wait
    for it; None says that it waited all along.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    bytes: int = 0
    track: str = "main"
    flow: str = ""
    line: str = ""
    waited_from: float | None = None


def messages(events: Iterable[Event]) -> list[tuple[Event, Event]]:
    """Return each send with its receive; a message of which only one end was recorded is left out.

    A trace of several runs may hold a flow name more than once: then the k-th send belongs to the k-th receive.
    """
    ends: dict[str, dict[str, list[Event]]] = {"send": defaultdict(list), "recv": defaultdict(list)}
    for event in events:
        if event.kind in ends and event.flow:
            ends[event.kind][event.flow].append(event)
    return [pair for flow, sends in ends["send"].items() for pair in zip(sends, ends["recv"][flow], strict=False)]


def source_line() -> str:
    """Return `file.py:12 in name` of the innermost caller outside this package, or "" on a thread of the package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("minidist."):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") == "threading":
        return ""
    return f"{file_name(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def file_name(file: str) -> str:
    """Return what to call a source file of the program: its name; a notebook's cells have none of their own."""
    path = Path(file)
    return "this notebook" if path.parent.name.startswith("ipykernel_") or file.startswith("<ipython") else path.name
