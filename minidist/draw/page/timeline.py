"""What each rank did in one step, as SVG, and who waited for whom."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from minidist.draw.table import format_seconds
from minidist.full.trace.events import COLLECTIVE, COMPUTE, RECEIVE, SEND, Event, EventKind

WIDTH, ROW, LEFT = 960, 20, 96
MOST = 4000  # bars; a step of many ranks has more than a page can hold
DRAWN = {COMPUTE: "compute", COLLECTIVE: "collective", EventKind.WAIT: "wait"}


def timeline(events: Sequence[Event]) -> str:
    """Return a figure with a row for each rank and each of its streams; nothing without events."""
    drawn = [event for event in events if event.kind in DRAWN]
    if not drawn:
        return ""
    begin, end = min(event.start for event in drawn), max(event.end for event in drawn)
    rows = sorted({(event.rank, event.track) for event in drawn}, key=_main_first)
    scale = (WIDTH - LEFT) / max(end - begin, 1e-12)
    longest = sorted(drawn, key=lambda event: event.start - event.end)[:MOST]
    bars = []
    for event in sorted(longest, key=lambda event: event.start):
        y = rows.index((event.rank, event.track)) * ROW
        x = LEFT + (event.start - begin) * scale
        width = max(0.3, (event.end - event.start) * scale)
        words = f"rank {event.rank}: {event.name}, {format_seconds(event.end - event.start)}"
        bars.append(
            f'<rect class="{DRAWN[event.kind]}" x="{x:.1f}" y="{y + 2}" width="{width:.1f}" '
            f'height="{ROW - 4}"><title>{escape(words)}</title></rect>'
        )
    names = [
        f'<text x="0" y="{place * ROW + 14}">rank {rank}{"" if track == "main" else " stream"}</text>'
        for place, (rank, track) in enumerate(rows)
    ]
    words = (
        f"one step, {format_seconds(end - begin)}, {len({rank for rank, _ in rows})} ranks: "
        "computing, collectives, and waiting for a stream of their own"
    )
    left_out = len(drawn) - len(longest)
    said = f"; {left_out:,} short ones are left out" if left_out else ""
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {len(rows) * ROW}" role="img" aria-label="{words}">'
        f"{''.join(names)}{''.join(bars)}</svg><figcaption>{words}{said}</figcaption></figure>"
    )


def waits(events: Iterable[Event]) -> dict[int, dict[int, float]]:
    """Return by rank the seconds that it waited for each other rank's end of a message.

    Where collectives send none (ranks that share memory, an engine's own), a rank waits for the one
    that comes last.
    """
    found: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    calls: dict[tuple[str, str], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.kind in (SEND, RECEIVE):
            peer = int(event.name.split()[-1])
            since = event.start if event.waited_from is None else event.waited_from
            found[event.rank][peer] += event.end - since
        elif event.kind is COLLECTIVE:
            calls[event.track, event.name][event.rank].append(event)
    if not found:
        for by_rank in calls.values():
            for together in zip(*by_rank.values(), strict=False):
                last = max(together, key=lambda event: event.start)
                for event in together:
                    if event is not last:
                        found[event.rank][last.rank] += last.start - event.start
    return {rank: dict(peers) for rank, peers in found.items()}


def _main_first(row: tuple[int, str]) -> tuple[int, bool, str]:
    rank, track = row
    return rank, track != "main", track
