"""Lesson 01, solved by hand from the handout: programs of several ranks, from sends and
receives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist import Communicator

Array = np.ndarray[Any, Any]
Plan = list[tuple[str, int]]


def pass_token(own: Array, comm: Communicator) -> Array:
    """Task 1: send a token once round the ring; every rank adds its `own` to it."""
    token = own.copy()
    if comm.size == 1:
        return token
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank == 0:
        comm.send(token, right)
        comm.recv(token, left)
    else:
        comm.recv(token, left)
        token += own
        comm.send(token, right)
    return token


def halo(piece: Array, width: int, comm: Communicator) -> Array:
    """Task 2: return this rank's piece with `width` elements of its neighbours at both ends."""
    first, last = piece[:width], piece[len(piece) - width :]
    if comm.size == 1:
        return np.concatenate([last, piece, first])
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    before, after = np.empty_like(first), np.empty_like(last)
    comm.exchange(last, right, before, left)
    comm.exchange(first, left, after, right)
    return np.concatenate([before, piece, after])


def chain_broadcast(buffer: Array, root: int, pieces: int, comm: Communicator) -> None:
    """Task 3: copy the root's buffer into everybody's, piece by piece along the chain that begins
    at the root.
    """
    number = (comm.rank - root) % comm.size  # this rank's place in the chain
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts = np.array_split(buffer, pieces)
    arriving = [comm.irecv(part, left) for part in parts] if number > 0 else []
    for index, part in enumerate(parts):
        if number > 0:
            arriving[index].wait()
        if number < comm.size - 1:
            comm.send(part, right)


def farm(
    rows: Array | None, shape: tuple[int, int], work: Callable[[Array], Array], comm: Communicator
) -> Array | None:
    """Task 4: rank 0, the master, deals out rows; the other ranks, the workers, return `work(row)`
    of each.
    """
    count, width = shape
    workers = comm.size - 1
    if comm.rank > 0:
        for _ in range(comm.rank - 1, count, workers):
            row = np.empty(width)
            comm.recv(row, 0)
            comm.send(np.ascontiguousarray(work(row)), 0)
        return None

    assert rows is not None
    results = np.empty(shape)
    if workers == 0:
        for index in range(count):
            results[index] = work(rows[index])
        return results
    for index in range(min(workers, count)):
        comm.send(rows[index], 1 + index)
    for index in range(count):
        worker = 1 + index % workers
        comm.recv(results[index], worker)
        if index + workers < count:  # the worker is free: it gets its next row
            comm.send(rows[index + workers], worker)
    return results


def who_never_finishes(plans: list[Plan]) -> list[int]:
    """Task 5: return the ranks that never come to the end of their plan, in order, without running
    it.
    """
    done = [0] * len(plans)  # how many lines of its plan each rank has behind it

    def at(rank: int, line: tuple[str, int]) -> bool:
        return done[rank] < len(plans[rank]) and plans[rank][done[rank]] == line

    moving = True
    while moving:
        moving = False
        for sender, plan in enumerate(plans):
            if done[sender] == len(plan) or plan[done[sender]][0] != "send":
                continue
            receiver = plan[done[sender]][1]
            if at(receiver, ("recv", sender)):
                done[sender] += 1
                done[receiver] += 1
                moving = True
    return [rank for rank, plan in enumerate(plans) if done[rank] < len(plan)]
