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
from typing import Any

from minidist.trace.events import Event, EventKind, messages

Entry = dict[str, Any]  # one entry of the file
Arrow = tuple[int, float]  # the number of a message, and when its send began

ROWS = ("compute", "communication", "sends", "receives")
COMPUTE, COMMUNICATION, SENDS, RECEIVES = range(4)
# The row of each kind; any other is communication.
ROW_OF_KIND = {EventKind.COMPUTE: COMPUTE, EventKind.SEND: SENDS, EventKind.RECEIVE: RECEIVES}


def write(events: Iterable[Event], path: str | Path) -> None:
    """Write events to a file, an entry a line. Times are microseconds since the first event, kept
    to the nanosecond.
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
    names = [
        entry for rank in ranks for entry in _names("process", {"pid": rank}, f"rank {rank}", rank)
    ]
    happened = [_counter(event, begin) for event in events if event.kind == EventKind.HELD]
    received: list[Entry] = []
    arrows, rows = _arrows(events), _rows(events)
    # No row bears a rank's number: viewers take the thread that has the number of its process for
    # the main one.
    numbers = itertools.count(max(ranks, default=0) + 1)
    for rank, track, row in sorted(
        rows, key=lambda key: (key[0], key[1] != "main", key[1], key[2])
    ):
        for lane, members in enumerate(_lanes(rows[rank, track, row], may_nest=row < SENDS)):
            where: Entry = {"pid": rank, "tid": next(numbers)}
            name = ROWS[row] if track == "main" else f"stream {track}: {ROWS[row]}"
            names += _names("thread", where, name + f" {lane + 1}" * (lane > 0), where["tid"])
            slices = [
                entry
                for event in members
                for entry in _slices(event, begin, where, arrows.get(id(event)))
            ]
            (received if row == RECEIVES else happened).extend(slices)
    # Sorting is stable, and what is received comes last: of two ends at the same moment, an arrow's
    # start is first.
    return names + sorted(happened + received, key=lambda entry: entry["ts"])


# ---------------------------------------------------------------- rows


def _rows(events: list[Event]) -> dict[tuple[int, str, int], list[Event]]:
    """Sort events into rows, by rank, track and kind."""
    rows: dict[tuple[int, str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind != EventKind.HELD:
            rows[event.rank, event.track, ROW_OF_KIND.get(event.kind, COMMUNICATION)].append(event)
    return rows


def _lanes(events: list[Event], may_nest: bool) -> list[list[Event]]:
    """Divide a row, first fit, into few lanes. In a lane no two slices cross, and none overlap
    unless they may nest.
    """
    # the longer one, and of two alike the one that was recorded last
    outer_first = -1 if may_nest else 1
    # slices, and the ends of the open ones, the outermost first
    lanes: list[tuple[list[Event], list[float]]] = []
    for event in sorted(
        events[::outer_first], key=lambda event: (event.start, outer_first * event.end)
    ):
        for lane in lanes:
            ends = lane[1]
            while ends and ends[-1] <= event.start:
                ends.pop()
            if not ends or (may_nest and event.end <= ends[-1]):
                break
        else:
            lane = ([], [])
            lanes.append(lane)
        lane[0].append(event)
        lane[1].append(event.end)
    return [members for members, _ in lanes]


def _arrows(events: list[Event]) -> dict[int, Arrow]:
    """Number the messages, by the identity of the event at either end. Clocks of two hosts may lie:
    none runs back.
    """
    arrows = {}
    for number, (send, receive) in enumerate(messages(events)):
        if send.start <= receive.end:
            arrows[id(send)] = arrows[id(receive)] = number, send.start
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
    start, end = _nanoseconds(event.start - begin), _nanoseconds(event.end - begin)
    details = {"bytes": event.bytes, "line": event.line}
    yield _slice(event.name, event.kind, start, end, where) | {
        "args": {k: v for k, v in details.items() if v != ""}
    }
    if arrow is None:
        return
    number, sent = arrow
    flow: Entry = {"name": "message", "cat": "message", "id": number, **where}
    if event.kind == EventKind.SEND:
        yield {"ph": "s", **flow, "ts": start / 1000}
    else:
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
    when = _nanoseconds(event.start - begin) / 1000
    return {
        "ph": "C",
        "name": "memory",
        "pid": event.rank,
        "ts": when,
        "args": {event.name: event.bytes},
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
