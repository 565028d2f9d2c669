"""Lesson 01, solved. The package has no such programs, except for task 5: it proves deadlocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

import minidist
from minidist import Communicator, DeadlockError

Array = np.ndarray[Any, Any]
Plan = list[tuple[str, int]]


def pass_token(own: Array, comm: Communicator) -> Array:
    """Send a token once round the ring; every rank adds its `own` to it."""
    token = own.copy()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return token
    # the only rank that sends first: otherwise all would wait for their left neighbour
    if comm.rank == 0:
        comm.send(token, right)
        comm.recv(token, left)
    else:
        comm.recv(token, left)
        token += own
        comm.send(token, right)
    return token


def halo(piece: Array, width: int, comm: Communicator) -> Array:
    """Return this rank's piece with `width` elements of its neighbours at both ends."""
    first, last = piece[:width], piece[len(piece) - width :]
    # right for a single rank, which is its own neighbour
    from_left, from_right = last.copy(), first.copy()
    if comm.size > 1:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.exchange(last, right, from_left, left)
        comm.exchange(first, left, from_right, right)
    return np.concatenate([from_left, piece, from_right])


def chain_broadcast(buffer: Array, root: int, pieces: int, comm: Communicator) -> None:
    """Copy the root's buffer into everybody's, piece by piece along the chain."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for piece in np.array_split(buffer, pieces):
        if comm.rank != root:
            comm.recv(piece, left)
        if right != root:
            comm.send(piece, right)


def farm(
    rows: Array | None, shape: tuple[int, int], work: Callable[[Array], Array], comm: Communicator
) -> Array | None:
    """Deal out rows to workers, and collect what `work` makes of them."""
    count, width = shape
    workers = comm.size - 1
    if comm.rank > 0:
        for _ in range(comm.rank - 1, count, workers):
            row = np.empty(width)
            comm.recv(row, 0)
            comm.send(work(row), 0)
        return None
    assert rows is not None
    results = np.empty(shape)
    if not workers:
        for row, result in zip(rows, results, strict=True):
            result[:] = work(row)
        return results
    for first in range(0, count, workers):
        # one row for each worker, fewer in the last round
        dealt = range(first, min(first + workers, count))
        for i in dealt:
            comm.send(rows[i], 1 + i % workers)
        for i in dealt:
            comm.recv(results[i], 1 + i % workers)
    return results


def who_never_finishes(plans: list[Plan]) -> list[int]:
    """Run the plans on simulated ranks, until all have finished or the package proves that nobody
    can go on.
    """
    finished = set()

    def follow(comm: Communicator) -> None:
        for kind, peer in plans[comm.rank]:
            call = comm.send if kind == "send" else comm.recv
            call(np.empty(0), peer)
        finished.add(comm.rank)

    with suppress(DeadlockError):
        minidist.run(follow, len(plans))
    return sorted(set(range(len(plans))) - finished)
