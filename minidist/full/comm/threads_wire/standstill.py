"""In words: who waits for whom, when no rank can go on, or one has waited for too long."""

import time
from collections.abc import Iterable

from minidist.full.comm.report import user_line
from minidist.full.comm.threads_wire.carriers.carrier import Carrier
from minidist.full.comm.threads_wire.lanes import Lane, Until, WaitsFor


def deadlock(waiting: list[Lane], carrier: Carrier) -> str:
    """Say who waits for whom, and close the cycle or the chain."""
    waiting.sort(key=_place)
    lines, edges = ["no rank can go on."], {}
    for lane in waiting:
        what, peer = waits_for(lane)
        lines.append(f"  rank {lane.rank}{lane.name} waits: {what}{_line(lane, carrier)}")
        if peer is not None and not isinstance(lane.awaits, Until):  # which names no other rank
            edges[lane.rank] = peer
    chain = [waiting[0].rank]
    while (peer := edges.get(chain[-1])) is not None and peer not in chain:
        chain.append(peer)
    if peer is not None:
        chain = [*chain[chain.index(peer) :], peer]
        lines.append("  each waits for the next: " + " -> ".join(map(str, chain)))
    elif chain[-1] not in {lane.rank for lane in waiting}:
        lines.append("  rank " + " waits for rank ".join(map(str, chain)) + ", which has finished")
    return "\n".join(lines)


def over_limit(start: str, limit: float, lanes: Iterable[Lane], carrier: Carrier) -> str:
    """Say that somebody took too long, and what all do."""
    longer = f"longer than one operation may (limit {limit:g} s). Who waits for whom:"
    lines = [f"{start}, {longer}"]
    for lane in sorted(lanes, key=_place):
        if state := _state(lane, carrier):
            lines.append(f"  rank {lane.rank}{lane.name} {state}{_line(lane, carrier)}")
    return "\n".join(lines)


def calls(lanes: list[Lane], carrier: Carrier) -> str:
    """Say which calls and lines lanes are in: a stream's thread knows its call alone."""
    said = ""
    for lane in lanes:
        if line := _line(lane, carrier):
            said += f"; rank {lane.rank}{lane.name}{line}"
    return said


def waits_for(lane: Lane) -> WaitsFor:
    """Return what a lane waits for, and for which rank."""
    return lane.awaits.waits_for() if lane.awaits is not None else ("", None)


def _place(lane: Lane) -> tuple[int, str]:
    return lane.rank, lane.name


def _state(lane: Lane, carrier: Carrier) -> str:
    """Say what a lane does now; nothing of a stream without work, or of a lane whose thread waits
    on another one, which says so.
    """
    if lane.finished:
        return "has finished"
    if doing := carrier.doing(lane):
        return doing
    if lane.awaits is None or lane.idle:
        return ""
    return f"waits {time.monotonic() - lane.since:.1f} s: {waits_for(lane)[0]}"


def _line(lane: Lane, carrier: Carrier) -> str:
    """Return where in its user's program a lane stands; nothing if it has finished."""
    if lane.thread is None or lane.finished:
        return ""
    return user_line(carrier.frame(lane))
