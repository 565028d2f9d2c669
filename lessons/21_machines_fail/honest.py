"""Lesson 21, solved by hand, from the handout alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil, exp
from typing import Any, NamedTuple

import numpy as np

from minidist import Communicator

Array = np.ndarray[Any, Any]
SLOW = 1.3


class View(NamedTuple):
    """The members of a job at one time, in the order of their ranks."""

    number: int
    members: tuple[int, ...]


def next_view(last: View, here: Collection[int], dead: Collection[int], ranks: int) -> View | None:
    """Count votes, then line up."""
    alive = set(here) - set(dead)
    voters = [member for member in last.members if member not in dead]
    votes = [member for member in voters if member in alive]
    if voters:
        half = 2 * len(votes) == len(voters) and min(voters) in votes
        if not half and 2 * len(votes) <= len(voters):
            return None
    newcomers = sorted(alive - set(last.members))
    members = tuple([*votes, *newcomers][:ranks])
    return View(last.number + 1, members) if members else None


class Standing(NamedTuple):
    """What a rank holds when a view begins."""

    done: int
    ready: bool


def recover(
    mine: Standing,
    take_step: Callable[[], None],
    arrays: Mapping[str, Array],
    comm: Communicator,
) -> int:
    """Take the step where that is enough; send to whoever is left."""
    standings = comm.all_gather_object((mine.done, mine.ready))
    newest = max(done for done, _ in standings)
    if newest == -1:
        return -1
    having, needy = [], []
    for rank, (done, ready) in enumerate(standings):
        catches_up = done == newest - 1 and ready
        (having if done == newest or catches_up else needy).append(rank)
        if catches_up and rank == comm.rank:
            take_step()
    for number, rank in enumerate(needy):
        peer = having[number % len(having)]
        for array in arrays.values():
            if comm.rank == peer:
                comm.send(array, to=rank)
            if comm.rank == rank:
                comm.recv(array, source=peer)
    return newest


def microbatches(
    order: Callable[[int], Array], step: int, batch: int, largest: int, ranks: int, rank: int
) -> list[tuple[Array, float]]:
    """Find the global batch, cut it for the ranks, and cut again."""
    batches = ceil(len(order(0)) / batch)
    epoch, number = step // batches, step % batches
    samples = order(epoch)[number * batch :][:batch]
    shares = np.array_split(samples, ranks)
    count = ceil(max(len(share) for share in shares) / largest)
    return [(part, len(part) / len(samples)) for part in np.array_split(shares[rank], count)]


def straggler(seconds: Array, rows: Sequence[int], stages: Sequence[int]) -> int | None:
    """Score each rank in each step; the median over the steps decides."""
    ranks = [rank for rank in range(len(rows)) if rows[rank] > 0]
    scores = {}
    for rank in ranks:
        peers = [peer for peer in ranks if stages[peer] == stages[rank]]
        each = []
        for step in seconds:
            paces = sorted(step[peer] / rows[peer] for peer in peers)
            usual = paces[(len(paces) - 1) // 2]
            each.append(step[rank] / rows[rank] / usual)
        scores[rank] = float(np.median(each))
    worst = max(scores, key=lambda rank: scores[rank])
    return worst if scores[worst] >= SLOW else None


def goodput(mtbf: float, step: float, stall: float, out: float, replicas: int) -> float:
    """Take off what is redone and what is missing; the rest is there while nobody stands still."""
    redone = step / 2 / mtbf
    missing = out / mtbf / replicas
    return max(0.0, 1 - redone - missing) * exp(-2 * stall / mtbf)


def spares(machines: int, mtbf: float, repair: float, risk: float) -> int:
    """Add a spare until it is likely enough that fewer machines are in repair."""
    mean = machines * repair / mtbf
    probability = exp(-mean)  # that none is in repair
    fewer, count = 0.0, 0
    while 1 - fewer > risk:
        fewer += probability
        count += 1
        probability *= mean / count
    return count
