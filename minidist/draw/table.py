"""A trace as a table: where did each rank's time go?

    main     ├──── compute ────┤├── wait ──┤    ?   ├ compute ┤
    +1             ├──── all_reduce ───────┤
                   ├ overlapped┤├ exposed ─┤├ other ┤
             └────────────────── total ───────────────────────┘

Communication is *exposed* while the rank's own thread only waits for it, and *overlapped* while
that thread does something else. Compute, exposed and other add up to the total. Events nest (a collective spans
its sends), so a time is the length of a *union* of intervals, and no moment counts twice.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from minidist.full.trace.events import COMMUNICATION, Event, EventKind

Interval = tuple[float, float]

RANKS = (
    "rank",
    "total",
    "compute",
    "exposed",
    "other",
    "overlapped",
    "communicating",
    "messages",
    "sent",
)
COLLECTIVES = ("collective", "calls", "bytes", "time", "a call")


def time_table(events: Iterable[Event]) -> str:
    """Return two tables as text: each rank's time, and the collectives by name.

    A rank's `total` is from the first event of the trace to the rank's last. `communicating` is the
    share of it that is exposed communication. `messages` and `sent` count what left the rank (see
    `format_sent`). In the second table a call is one rank's part in a collective. Its bytes are
    those of the buffer, and everything is summed over the ranks.
    """
    by_rank: dict[int, list[Event]] = defaultdict(list)
    by_name: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind != EventKind.HELD:
            by_rank[event.rank].append(event)
        if event.kind == EventKind.COLLECTIVE:
            by_name[event.name].append(event)
    if not by_rank:
        return "nothing was recorded"
    begin = min(event.start for mine in by_rank.values() for event in mine)
    rows = [_rank(rank, begin, by_rank[rank]) for rank in sorted(by_rank)]
    tables = [aligned(RANKS, rows)]
    if by_name:
        rows = [_collective(name, by_name[name]) for name in sorted(by_name)]
        tables.append(aligned(COLLECTIVES, rows))
    return "\n\n".join(tables)


def format_seconds(seconds: float) -> str:
    """Return a time in the unit that suits it: `1.5 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if round(seconds / scale, 1) >= 1:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds * 1e9:.1f} ns" if seconds > 5e-11 else "0"


def format_bytes(bytes: int) -> str:
    """Return a size in the binary unit that suits it: `1.5 KiB`."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if bytes >= scale:
            return f"{bytes / scale:.1f} {unit}"
    return f"{bytes} B"


def format_sent(sent: Iterable[int], in_words: Callable[[int], str] = format_bytes) -> str:
    """Return the bytes of messages, and behind a plus what the engine's own collectives had to
    send, by formula.
    """
    counted, engine = sent
    said = in_words(counted)
    if engine:
        said += f" + {in_words(engine)} by the engine, by formula"
    return said


def covered(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


# ---------------------------------------------------------------- rows


def _rank(rank: int, begin: float, events: list[Event]) -> list[str]:
    main = [event for event in events if event.track == "main"]
    blocked = [(_blocked_from(event), event.end) for event in main if event.kind in COMMUNICATION]
    under_way = [(event.start, event.end) for event in events if event.kind in COMMUNICATION]
    computing = [(event.start, event.end) for event in main if event.kind == EventKind.COMPUTE]
    sends = [event.bytes for event in events if event.kind == EventKind.SEND]
    # The length of A without B is that of their union less that of B.
    total = max(event.end for event in events) - begin
    exposed = covered(blocked)
    compute = covered(computing + blocked) - exposed
    overlapped = covered(under_way + blocked) - exposed
    other = total - compute - exposed
    seconds = (total, compute, exposed, other, overlapped)
    share = exposed / total if total else 0.0
    engine = sum(event.engine_bytes for event in events)
    sent = format_sent((sum(sends), engine))
    return [str(rank), *map(format_seconds, seconds), f"{share:.1%}", str(len(sends)), sent]


def _blocked_from(event: Event) -> float:
    return event.start if event.waited_from is None else event.waited_from


def _collective(name: str, calls: list[Event]) -> list[str]:
    seconds = sum(event.end - event.start for event in calls)
    bytes = format_bytes(sum(event.bytes for event in calls))
    return [
        name,
        str(len(calls)),
        bytes,
        format_seconds(seconds),
        format_seconds(seconds / len(calls)),
    ]


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows as text in columns: the first `left` of them to the left, the numbers to the
    right.
    """
    columns = []
    for number, column in enumerate(zip(header, *rows, strict=True)):
        width = max(map(len, column))
        align = str.ljust if number < left else str.rjust
        columns.append([align(cell, width) for cell in column])
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    return "\n".join(lines)
