"""Lesson 16, solved: with the package's all-gather, and its lengths of unions of intervals."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from minidist import Communicator
from minidist.draw.table import covered
from minidist.full.collectives import all_gather
from minidist.full.trace import Event
from minidist.full.trace.events import COMMUNICATION

Array: TypeAlias = np.ndarray[Any, Any]
Timeline: TypeAlias = list[tuple[float, dict[str, int]]]
State: TypeAlias = tuple[str, int, float]
Look: TypeAlias = tuple[float, list[State]]


def digest(data: bytes) -> int:
    """Return 64 bits of SHA-256. (Python's `hash` of a text is another in each process.)"""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)


def from_all(numbers: Sequence[int], comm: Communicator) -> Array:
    """Return every rank's numbers, a row for each rank."""
    mine = np.array(numbers, np.int64)
    return np.asarray(all_gather(mine, comm, algorithm="ring")).reshape(comm.size, len(mine))


def odd_ones(answers: Sequence[int]) -> list[int]:
    """Return who says something else than most. `most_common` keeps the order of first sight among
    equals.
    """
    usual = Counter(answers).most_common(1)[0][0]
    return [rank for rank, answer in enumerate(answers) if answer != usual]


def odd_ranks(words: str, comm: Communicator) -> list[int]:
    """Compare digests of what the ranks are about to call."""
    return odd_ones(from_all([digest(words.encode())], comm)[:, 0].tolist())


def first_difference(arrays: dict[str, Array], comm: Communicator) -> tuple[str, list[int]] | None:
    """Compare one digest of everything; only if that differs, one of each array."""
    digests = [digest(array.tobytes()) for array in arrays.values()]
    if not odd_ones(from_all([digest(str(digests).encode())], comm)[:, 0].tolist()):
        return None
    table = from_all(digests, comm)
    odd = {name: odd_ones(table[:, column].tolist()) for column, name in enumerate(arrays)}
    return next((name, ranks) for name, ranks in odd.items() if ranks)


def waiting(events: list[Event]) -> dict[int, float]:
    """Return the length of the union of a rank's intervals of communication."""
    blocked: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        blocked[event.rank] += []
        if event.kind in COMMUNICATION and event.track == "main":
            blocked[event.rank].append(
                (event.start if event.waited_from is None else event.waited_from, event.end)
            )
    return {rank: covered(intervals) for rank, intervals in blocked.items()}


def straggler(events: list[Event]) -> int | None:
    """Return the rank that waits least, if that is less than half of the median."""
    seconds = waiting(events)
    slow = min(sorted(seconds), key=seconds.__getitem__)
    return slow if seconds[slow] < np.median(list(seconds.values())) / 2 else None


def out_of_memory(timeline: Timeline, capacity: int, comm: Communicator) -> tuple[int, str] | None:
    """Compare what the ranks hold at their peaks."""
    peak = max((held for _, held in timeline), key=lambda held: sum(held.values()))
    table = from_all(list(peak.values()), comm)
    rank = int(np.argmax(table.sum(axis=1)))
    if table[rank].sum() <= capacity:
        return None
    return rank, list(peak)[int(np.argmax(table[rank] - np.median(table, axis=0)))]


def watch(
    look: Callable[[], Look], pause: Callable[[], None], limit: float
) -> tuple[str, list[int]] | None:
    """Follow who waits for whom."""
    before: list[State] = []
    while True:
        now, states = look()
        for rank in (rank for rank, state in enumerate(states) if state[0] == "waits"):
            finding = follow(rank, states)
            kind, ranks = finding
            stood_still = bool(before) and all(
                states[r] == before[r] for r in ranks if states[r][0] == "waits"
            )
            if (now - states[rank][2] > limit) if kind == "slow" else stood_still:
                return finding
        if all(state[0] == "finished" for state in states):
            return None
        before = states
        pause()


def follow(rank: int, states: list[State]) -> tuple[str, list[int]]:
    """Return how the chain that begins with `rank` ends, and its ranks, or those of its cycle."""
    chain = [rank]
    while states[chain[-1]][0] == "waits":
        peer = states[chain[-1]][1]
        if peer in chain:
            cycle = chain[chain.index(peer) :]
            lowest = cycle.index(min(cycle))
            return "deadlock", cycle[lowest:] + cycle[:lowest]
        chain.append(peer)
    return "gone" if states[chain[-1]][0] == "finished" else "slow", chain
