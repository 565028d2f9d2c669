"""A trace as a picture: Chrome trace JSON, which https://ui.perfetto.dev and chrome://tracing open.

    rank 0    compute           ├──── forward ────┤
              communication                       ├──── all_reduce ring ────┤
              sends                               ├─ to 1 ──┤├─ to 1 ──┤
                                                   ╲          ╲                 an arrow for each message
    rank 1    receives                      ├──────▶ from 0 ┤├▶ from 0 ┤
                                            └ posted before it was sent

A process is a rank, and each of its threads is a *row* of slices. Slices of one row must nest, or
the viewer drops them. The spans of one thread nest. Messages need not: one that was posted ahead
overlaps the next. So sends and receives have rows of their own, as many as it takes for no two to
overlap, and so has every stream.

An arrow binds to the slice that opened last in its row, so it is written right behind that slice,
with the same time. It must not run back in time: a receive that was posted before its send gets an
inner slice, `arriving`, which begins with the send, and the arrow points at that. The part before
it shows how long the receiver waited for a late sender.

Format: "Trace Event Format" (Google, 2016). Perfetto's reading of it:
src/trace_processor/importers/json.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from minidist.full.trace.events import Event, EventKind, messages

Entry = dict[str, Any]  # one entry of the file
Arrow = tuple[int, float]  # the number of a message, and when its send began
RowKey = tuple[int, str, int]  # a rank, a track, and a number in ROWS


class Lane(NamedTuple):
    """A part of a row: its slices, and the ends of those that are open, the outermost first."""

    members: list[Event]
    ends: list[float]


ROWS = ("compute", "communication", "sends", "receives")
COMPUTE = 0
COMMUNICATION = 1
SENDS = 2
RECEIVES = 3
# The row of each kind; any other is communication.
ROW_OF_KIND = {EventKind.COMPUTE: COMPUTE, EventKind.SEND: SENDS, EventKind.RECEIVE: RECEIVES}


def write(events: Iterable[Event], path: str | Path) -> None:
    """Write events to a file, an entry a line.

    Times are microseconds since the first event, kept to the nanosecond.
    """
    lines = ",\n".join(json.dumps(entry) for entry in entries(events))
    Path(path).write_text('{"traceEvents": [\n' + lines + "\n]}\n")


def entries(events: Iterable[Event]) -> list[Entry]:
    """Return the entries of the file: the names of ranks and rows, then all that happened, in order
    of time.
    """
    events = list(events)
    begin = min((event.start for event in events), default=0.0)
    ranks = sorted({event.rank for event in events})
    names: list[Entry] = []
    for rank in ranks:
        names += _names("process", {"pid": rank}, f"rank {rank}", rank)
    happened = [_counter(event, begin) for event in events if event.kind == EventKind.HELD]
    received: list[Entry] = []
    arrows = _arrows(events)
    rows = _rows(events)
    # Viewers take a thread that has the number of its process for the main one, so rows are
    # numbered above all ranks.
    numbers = itertools.count(max(ranks, default=0) + 1)
    for rank, track, row in sorted(rows, key=_main_first):
        name = ROWS[row] if track == "main" else f"stream {track}: {ROWS[row]}"
        lanes = _lanes(rows[rank, track, row], may_nest=row < SENDS)
        for lane, members in enumerate(lanes, start=1):
            where: Entry = {"pid": rank, "tid": next(numbers)}
            shown = name if lane == 1 else f"{name} {lane}"
            names += _names("thread", where, shown, where["tid"])
            slices = received if row == RECEIVES else happened
            for event in members:
                slices += _slices(event, begin, where, arrows.get(id(event)))
    # Sorting is stable, and what is received comes last. So if an arrow starts and ends at the same
    # moment, its start is first.
    return names + sorted(happened + received, key=lambda entry: entry["ts"])


# ---------------------------------------------------------------- rows


def _rows(events: list[Event]) -> dict[RowKey, list[Event]]:
    """Sort events into rows, by rank, track and kind."""
    rows: dict[RowKey, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind != EventKind.HELD:
            row = ROW_OF_KIND.get(event.kind, COMMUNICATION)
            rows[event.rank, event.track, row].append(event)
    return rows


def _main_first(row: RowKey) -> tuple[int, bool, str, int]:
    """Return a key to sort rows by: a rank's main thread comes before its streams."""
    rank, track, kind = row
    return rank, track != "main", track, kind


def _lanes(events: list[Event], may_nest: bool) -> list[list[Event]]:
    """Divide a row, first fit, into few lanes.

    In a lane no two slices cross, and only slices that may nest overlap.
    """
    # If slices nest, the outer ones come first: the longer, and of two alike the one that was
    # recorded last.
    outer_first = -1 if may_nest else 1
    ordered = sorted(events[::outer_first], key=lambda one: (one.start, outer_first * one.end))
    lanes: list[Lane] = []
    for event in ordered:
        for lane in lanes:
            ends = lane.ends
            while ends and ends[-1] <= event.start:
                ends.pop()
            if not ends or (may_nest and event.end <= ends[-1]):
                break
        else:
            lane = Lane([], [])
            lanes.append(lane)
        lane.members.append(event)
        lane.ends.append(event.end)
    return [lane.members for lane in lanes]


def _arrows(events: list[Event]) -> dict[int, Arrow]:
    """Number the messages, by the identity of the event at either end.

    The clocks of two hosts may differ, so a message may seem to run back in time: it gets no arrow.
    """
    arrows = {}
    for number, (send, receive) in enumerate(messages(events)):
        if send.start <= receive.end:
            arrow = number, send.start
            arrows[id(send)] = arrow
            arrows[id(receive)] = arrow
    return arrows


# ---------------------------------------------------------------- entries


def _names(what: str, where: Entry, name: str, place: int) -> list[Entry]:
    """Return the entries that give a process or a thread its name and its place."""
    return [
        {"ph": "M", "name": f"{what}_name", **where, "args": {"name": name}},
        {"ph": "M", "name": f"{what}_sort_index", **where, "args": {"sort_index": place}},
    ]


def _slices(event: Event, begin: float, where: Entry, arrow: Arrow | None) -> Iterator[Entry]:
    """Yield an event's slice, and its end of an arrow."""
    start = _nanoseconds(event.start - begin)
    end = _nanoseconds(event.end - begin)
    details: Entry = {"bytes": event.bytes}
    if event.line != "":
        details["line"] = event.line
    yield _slice(event.name, event.kind, start, end, where) | {"args": details}
    if arrow is None:
        return
    number, sent = arrow
    flow: Entry = {"name": "message", "cat": "message", "id": number, **where}
    if event.kind == EventKind.SEND:
        yield {"ph": "s", **flow, "ts": start / 1000}
        return
    arriving = max(start, _nanoseconds(sent - begin))
    if arriving > start:
        yield _slice("arriving", event.kind, arriving, end, where)
    yield {"ph": "f", "bp": "e", **flow, "ts": arriving / 1000}


def _slice(name: str, kind: str, start: int, end: int, where: Entry) -> Entry:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        **where,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
    }


def _counter(event: Event, begin: float) -> Entry:
    microseconds = _nanoseconds(event.start - begin) / 1000
    return {
        "ph": "C",
        "name": "memory",
        "pid": event.rank,
        "ts": microseconds,
        "args": {event.name: event.bytes},
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
