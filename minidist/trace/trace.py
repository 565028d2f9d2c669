"""The list of events that ranks record, and what can be made of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from minidist.trace.events import Event, EventKind
from minidist.trace.perfetto import write
from minidist.trace.table import time_table


class Trace:
    """A list of events. Appending is safe from any thread (CPython appends atomically)."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)

    def record(self, event: Event) -> None:
        """Append one event."""
        self.events.append(event)

    def held(self, rank: int, when: float, bytes: int) -> None:
        """Say that `rank` holds `bytes` from the moment `when` on."""
        self.record(Event(rank, EventKind.HELD, "bytes held", when, when, bytes))

    def save(self, path: str | Path) -> None:
        """Write Chrome trace JSON, which https://ui.perfetto.dev and chrome://tracing open."""
        write(self.events, Path(path))

    def table(self) -> str:
        """Return where each rank's time went, as text."""
        return time_table(self.events)
