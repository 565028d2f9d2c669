"""The list of events that ranks record."""

from collections.abc import Iterable

from minidist.full.trace.events import Event, EventKind


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
