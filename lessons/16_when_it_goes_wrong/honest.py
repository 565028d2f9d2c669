"""Lesson 16 answered by hand, from the handout alone: five tools that find the rank at fault."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from minidist import Communicator
from minidist.full.trace import Event

Array: TypeAlias = np.ndarray[Any, Any]
# what a rank held from each moment on, by category
Timeline: TypeAlias = list[tuple[float, dict[str, int]]]
# ("computes", -1, 0), ("finished", -1, 0) or ("waits", for whom, since when)
State: TypeAlias = tuple[str, int, float]
Look: TypeAlias = tuple[float, list[State]]  # the time now, and the state of every rank


def odd_ranks(words: str, comm: Communicator) -> list[int]:
    """Task 1: return the ranks whose `words` are not those that most ranks have."""
    return _odd(_from_everybody(_digest(words.encode()), comm))


def first_difference(arrays: dict[str, Array], comm: Communicator) -> tuple[str, list[int]] | None:
    """Task 2: return the first array that is not the same on all ranks, and on which ranks it is
    odd; or None.
    """
    each = [_digest(array.tobytes()) for array in arrays.values()]
    if not _odd(_from_everybody(_digest(b"".join(each)), comm)):
        return None
    of_ranks = _from_everybody(b"".join(each), comm)
    for number, name in enumerate(arrays):
        odd = _odd([digests[8 * number : 8 * number + 8] for digests in of_ranks])
        if odd:
            return name, odd
    return None


def _digest(content: bytes) -> bytes:
    """Return 8 bytes that are the same for the same content in every process."""
    return hashlib.sha256(content).digest()[:8]


def _from_everybody(mine: bytes, comm: Communicator) -> list[bytes]:
    """Return every rank's bytes, by rank: one message from each to each."""
    outgoing = np.frombuffer(mine, np.uint8)
    found = [mine] * comm.size
    for distance in range(1, comm.size):
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        incoming = np.empty_like(outgoing)
        comm.exchange(outgoing, to, incoming, source)
        found[source] = incoming.tobytes()
    return found


def _odd(answers: list[bytes]) -> list[int]:
    """Return the ranks that do not have what most have; of a tie, what the lowest rank has is
    right.
    """
    right = max(answers, key=answers.count)  # the first of several
    return [rank for rank, answer in enumerate(answers) if answer != right]


def waiting(events: list[Event]) -> dict[int, float]:
    """Task 3: return for each rank in how many seconds its main thread did nothing but
    communicate.
    """
    kinds = {"send", "recv", "collective", "wait"}
    intervals: dict[int, list[tuple[float, float]]] = {event.rank: [] for event in events}
    for event in events:
        if event.kind in kinds and event.track == "main":
            start = event.start if event.waited_from is None else event.waited_from
            intervals[event.rank].append((start, event.end))
    return {rank: _union(found) for rank, found in intervals.items()}


def _union(intervals: list[tuple[float, float]]) -> float:
    """Return how long at least one of the intervals lasts."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def straggler(events: list[Event]) -> int | None:
    """Task 3, continued: return the rank that waits least, if that is less than half of the median;
    or None.
    """
    waits = waiting(events)
    if not waits:
        return None
    least = min(sorted(waits), key=lambda rank: waits[rank])
    return least if waits[least] < np.median(list(waits.values())) / 2 else None


def out_of_memory(timeline: Timeline, capacity: int, comm: Communicator) -> tuple[int, str] | None:
    """Task 4: return which rank runs out of memory, and the category that is to blame; or None."""
    _, peak = max(timeline, key=lambda sample: sum(sample[1].values()))  # the first of several
    mine = np.array(list(peak.values()), np.int64)
    peaks = np.array(
        [np.frombuffer(theirs, np.int64) for theirs in _from_everybody(mine.tobytes(), comm)]
    )
    totals = peaks.sum(axis=1)
    worst = int(totals.argmax())
    if totals[worst] <= capacity:
        return None
    excess = peaks[worst] - np.median(peaks, axis=0)
    return worst, list(peak)[int(excess.argmax())]


def watch(
    look: Callable[[], Look], pause: Callable[[], None], limit: float
) -> tuple[str, list[int]] | None:
    """Task 5: look again and again at what the ranks do; return the first finding, or None when all
    have finished.
    """
    before: list[State] | None = None
    while True:
        now, states = look()
        if all(state[0] == "finished" for state in states):
            return None
        for rank, state in enumerate(states):
            if state[0] == "waits":
                finding = _follow(rank, now, states, before, limit)
                if finding is not None:
                    return finding
        before = list(states)
        pause()


def _follow(
    rank: int, now: float, states: list[State], before: list[State] | None, limit: float
) -> tuple[str, list[int]] | None:
    """Follow the chain from a rank that waits; return what it proves, or None."""

    def unchanged(ranks: list[int]) -> bool:
        return before is not None and all(states[each] == before[each] for each in ranks)

    chain = [rank]
    while states[chain[-1]][0] == "waits":
        awaited = states[chain[-1]][1]
        if awaited in chain:
            cycle = chain[chain.index(awaited) :]
            lowest = cycle.index(min(cycle))
            return ("deadlock", cycle[lowest:] + cycle[:lowest]) if unchanged(cycle) else None
        chain.append(awaited)
    if states[chain[-1]][0] == "finished":
        return ("gone", chain) if unchanged(chain[:-1]) else None
    return ("slow", chain) if now - states[rank][2] > limit else None
