"""Lesson 21, solved: the package's agreement, the sampler's share, its scores, its closed form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import exp
from typing import Any, NamedTuple

import numpy as np

from minidist import Communicator
from minidist.full.comm.membership import agreement
from minidist.full.comm.membership.agreement import Presence, Wanted
from minidist.full.ddp.sampler import share
from minidist.full.trainer.observed.stragglers import SLOW, scores

Array = np.ndarray[Any, Any]


class View(NamedTuple):
    """As in the exercise."""

    number: int
    members: tuple[int, ...]


class Standing(NamedTuple):
    """As in the exercise."""

    done: int
    ready: bool


def next_view(last: View, here: Collection[int], dead: Collection[int], ranks: int) -> View | None:
    """Who was in the last view holds something; newcomers hold nothing."""
    present = [Presence(member, 0 if member in last.members else -1) for member in here]
    found = agreement.next_view(agreement.View(*last), present, dead, Wanted(ranks))
    return found and View(*found)


def recover(
    mine: Standing,
    take_step: Callable[[], None],
    arrays: Mapping[str, Array],
    comm: Communicator,
) -> int:
    """As the trainer's carrier does it (`minidist/full/trainer/elastic/carry.py`): meet, then fill."""
    standings = [Standing(*each) for each in comm.all_gather_object(tuple(mine))]
    newest = max(each.done for each in standings)
    if newest < 0:
        return -1
    can = [newest in (each.done, each.done + each.ready) for each in standings]
    if mine.done < newest and can[comm.rank]:
        take_step()
    holders = [rank for rank in range(comm.size) if can[rank]]
    needy = [rank for rank in range(comm.size) if rank not in holders]
    for number, rank in enumerate(needy):
        source = holders[number % len(holders)]
        for array in arrays.values():
            if comm.rank == source:
                comm.send(array, to=rank)
            elif comm.rank == rank:
                comm.recv(array, source=source)
    return newest


def microbatches(
    order: Callable[[int], Array], step: int, batch: int, largest: int, ranks: int, rank: int
) -> list[tuple[Array, float]]:
    """Shares of shares; the first rank's is the largest."""
    epoch, number = divmod(step, -(-len(order(0)) // batch))
    whole = order(epoch)[number * batch : (number + 1) * batch]
    most = share(len(whole), ranks, 0)
    count = -(-(most.stop - most.start) // largest)
    mine = whole[share(len(whole), ranks, rank)]
    parts = [mine[share(len(mine), count, part)] for part in range(count)]
    return [(part, len(part) / len(whole)) for part in parts]


def straggler(seconds: Array, rows: Sequence[int], stages: Sequence[int]) -> int | None:
    """Score each step as the trainer does."""
    lasting = np.median([scores(step, rows, stages) for step in seconds.tolist()], axis=0)
    worst = int(np.argmax(lasting))
    return worst if lasting[worst] >= SLOW else None


def goodput(mtbf: float, step: float, stall: float, out: float, replicas: int) -> float:
    """Count as the planner does, but for replicas that are out together: these are rare here."""
    trained = 1 - step / 2 / mtbf - out / mtbf / replicas
    return max(0.0, trained) * exp(-2 * stall / mtbf)


def spares(machines: int, mtbf: float, repair: float, risk: float) -> int:
    """Add up probabilities from 0 machines on, until what is left is small enough."""
    mean = machines * repair / mtbf
    term, below, count = exp(-mean), 0.0, 0
    while 1 - below > risk:
        below += term
        count += 1
        term *= mean / count
    return count
