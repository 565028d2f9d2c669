"""Join the ranks' traces into one. On the `mpi` and `torch` wires each process records a trace of its
own.

    trace = gather_trace(comm)                  # on every rank
    if comm.rank == 0:
        write(trace.events, "step.json")        # of `perfetto.py`

The processes of one host read one clock. Clocks of different hosts begin anywhere, so hosts are
aligned at a barrier. They leave it within about the time of a message; a host may be drawn too early
or too late by that time.
"""

from collections.abc import Sequence
from dataclasses import replace

from minidist.full.comm import Communicator
from minidist.full.trace import Event, Trace


def gather_trace(comm: Communicator) -> Trace:
    """Return the events of all ranks of `comm`, in times of rank 0's clock.

    Collective; every rank receives everything.

    Raises
    ------
    ValueError
        If no rank has a trace.
    """
    me = comm.members[comm.rank]
    own = None if comm.trace is None else [event for event in comm.trace.events if event.rank == me]
    answers = comm.all_gather_object(own)
    if all(events is None for events in answers):
        raise ValueError(
            "no rank has recorded a trace: start with init(trace=Trace()) or run(..., "
            "trace=Trace())"
        )
    ahead = [0.0] * comm.size
    if not comm.wire.one_process:
        comm.barrier()  # opens connections, so that the next one lets everybody go at once
        comm.barrier()
        ahead = clocks_ahead([node[0] for node in comm.nodes], comm.all_gather_object(comm.clock()))
    return Trace(
        moved(event, -ahead[rank]) for rank, events in enumerate(answers) for event in events or ()
    )


def clocks_ahead(nodes: Sequence[int], clocks: Sequence[float]) -> list[float]:
    """Return by how many seconds each rank's clock is ahead of rank 0's: the same for all ranks of
    a node.

    Parameters
    ----------
    nodes
        For each rank, the first rank of its node, whose clock speaks for the node.
    clocks
        What each rank's clock said at the same moment.
    """
    return [clocks[node] - clocks[nodes[0]] for node in nodes]


def moved(event: Event, seconds: float) -> Event:
    """Return the event, `seconds` later."""
    waited_from = None if event.waited_from is None else event.waited_from + seconds
    return replace(
        event, start=event.start + seconds, end=event.end + seconds, waited_from=waited_from
    )
