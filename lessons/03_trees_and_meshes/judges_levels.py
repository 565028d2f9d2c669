"""Lesson 03, task 4: the program that runs beside an answer, and its judge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from judges import through_float64

from minidist import Communicator, Trace
from minidist.course.grader.compare import some_parts
from minidist.course.grader.contract import (
    SEEN,
    Arrays,
    Case,
    Note,
    Wrong,
    awaited,
    expect_equal,
    expect_orderly,
    sent_by,
)


def levels(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 on consecutive ranks as nodes."""
    buffer, per_node, comm.trace = given["buffer"].copy(), comm.size // int(given["nodes"]), Trace()
    inside, across = comm.split(comm.rank // per_node), comm.split(comm.rank % per_node)
    exercise.hierarchical_all_reduce(buffer, inside, across)
    return {"buffer": buffer, "awaited": awaited(comm.trace)}


def judge_levels(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everybody has the sum; few messages, and few bytes across nodes."""
    buffers, count = [given["buffer"] for given in case.given], int(case.given[0]["nodes"])
    total, per_node = np.sum(buffers, axis=0, dtype=buffers[0].dtype), case.ranks // count
    shard = math.ceil(len(total) / per_node)
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    for rank, result in enumerate(results):
        node = rank // per_node * per_node
        wrong = {
            "only the node's own ranks are summed": np.sum(
                buffers[node : node + per_node], axis=0, dtype=total.dtype
            )
        }
        chunk = np.array_split(np.arange(len(total)), per_node)[rank % per_node]
        wrong["the shards are not gathered in the end"] = np.where(
            np.isin(np.arange(len(total)), chunk), total, buffers[rank]
        )
        found = result["buffer"]
        wrong["the mean is formed, not the sum"] = total / case.ranks
        wrong["the mean is formed and rounded down, where a sum is asked for"] = total // case.ranks
        of_one = [
            np.sum(buffers[one::per_node], axis=0, dtype=total.dtype) for one in range(per_node)
        ]
        owner = np.repeat(
            np.arange(per_node), [len(part) for part in np.array_split(total, per_node)]
        )
        wrong["each shard is summed across the nodes alone, and not inside them first"] = np.choose(
            owner, of_one
        )
        wrong |= through_float64(result["buffer"], total)
        for other in range(per_node):
            part = owner == other
            if found.shape == total.shape and not np.array_equal(found[part], total[part]):
                if story := some_parts(found[part], [buffer[part] for buffer in buffers], 0.0):
                    wrong[f"shard {other} is not summed over all ranks{story}"] = SEEN
                elif not np.array_equal(found[part], buffers[rank][part]):
                    wrong[f"shard {other} is not the sum of all ranks, once each"] = SEEN
                break
        expect_equal(
            rank, "the buffer", found, total, instead=wrong, before=buffers[rank], parts=buffers
        )
    for rank in range(case.ranks):
        sent = sent_by(rank, notes)
        across = [note for note in sent if note.to // per_node != rank // per_node]
        rounds, found = 2 * (count - 1), sum(note.bytes for note in across)
        most = rounds * math.ceil(shard / count) * total.itemsize
        if count > 1 and not across:
            raise Wrong(
                f"rank {rank} sent no message to other nodes, expected {rounds}: each rank "
                "sends its shard across"
            )
        if found > most:
            whole = ": whole buffers cross, not shards" * (
                found >= most * per_node and per_node > 1
            )
            wide = ": the numbers travel in 8 bytes each" * (found == most // total.itemsize * 8)
            raise Wrong(
                f"rank {rank} sent {found} bytes to other nodes, expected {most}{wide or whole}"
            )
        for where, messages, peers in (
            ("to other nodes", len(across), count),
            ("inside", len(sent) - len(across), per_node),
        ):
            if messages > 2 * (peers - 1):
                raise Wrong(
                    f"rank {rank} sent {messages} messages {where}, expected {2 * (peers - 1)}: a "
                    "reduce-scatter and an all-gather"
                )
