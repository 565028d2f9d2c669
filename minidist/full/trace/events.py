"""One event, and what belongs to it.

rank 0   ├── forward ──┤├── all_reduce (ring) ─────────┤
                          ├ send ┤├ send ┤  ...             events nest: a collective spans its messages
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    """What an event is, and what a trace calls it."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "recv"
    COLLECTIVE = "collective"
    WAIT = "wait"  # for another stream of the same rank
    HELD = "held"  # no work: how many bytes the rank holds from then on


# Every message and collective uses these: Python 3.11 takes 0.1 microseconds to look a member up in
# its class.
COMPUTE = EventKind.COMPUTE
SEND = EventKind.SEND
RECEIVE = EventKind.RECEIVE
COLLECTIVE = EventKind.COLLECTIVE

COMMUNICATION = tuple(kind for kind in EventKind if kind not in (EventKind.COMPUTE, EventKind.HELD))


@dataclass(frozen=True, slots=True)
class Event:
    """Something a rank did between two moments.

    Attributes
    ----------
    rank : int
        The rank in the world.
    kind : EventKind
        What it is.
    name : str
        What a trace calls it: `send to 1`, `all_reduce ring`, `forward`.
    start, end : float
        In seconds, on the clock of the communicator that recorded it.
    bytes : int
        The bytes that it moves. A collective has the size of its buffer, `held` the bytes that the
        rank has from then on.
    track : str
        The stream that did it; `main` is the rank's own thread.
    flow : str
        The name of a message, which its send and its receive share.
    line : str
        The line of the program that asked for it, where there is one; see `lines.py`.
    waited_from : float or None
        When the rank began to wait for a message that it had posted ahead; until then it did
        something else beside the message. None if the rank waited from `start` on.
    engine_bytes : int
        The bytes that the rank had to send, by formula, in a collective of the engine's own, which
        records no messages.
    """

    rank: int
    kind: EventKind
    name: str
    start: float
    end: float
    bytes: int = 0
    track: str = "main"
    flow: str = ""
    line: str = ""
    waited_from: float | None = None
    engine_bytes: int = 0


def messages(events: Iterable[Event]) -> list[tuple[Event, Event]]:
    """Return each send with its receive. Messages with only one recorded end are left out.

    A trace of several runs may hold the same flow name several times: then the k-th send belongs to
    the k-th receive.
    """
    sends: dict[str, list[Event]] = defaultdict(list)
    receives: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.flow:
            (sends if event.kind == EventKind.SEND else receives)[event.flow].append(event)
    return [
        pair for flow, sent in sends.items() for pair in zip(sent, receives[flow], strict=False)
    ]
