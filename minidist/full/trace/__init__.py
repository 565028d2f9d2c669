"""Floor 0: events. Who did what, when, how many bytes.

A `Trace` is a list of events to which anybody may append. `draw/table.py` makes of it a table of
where the time went, `draw/perfetto.py` a file for Perfetto or chrome://tracing. Times are seconds
on the clock of the communicator that recorded them: the machine's, or a modelled cluster's.

Read `events.py`, then `trace.py`, the list, and `lines.py`, which finds the line of the program.
"""

from minidist.full.trace.events import Event, EventKind
from minidist.full.trace.trace import Trace

__all__ = ["Event", "EventKind", "Trace"]
