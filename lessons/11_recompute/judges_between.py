"""Lesson 11, task 5: the program that runs beside an answer, and its judge."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from judges import Part, Stored, begin_gradients, compare, forward_and_backward

import minidist
from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, sent_by
from minidist.full.adjoint import copy_to, reduce_from


def run_between(exercise: Any, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5 on this rank's rows of pairs of matrices: tensor-parallel regions, and a silent
    tail.
    """
    enter, leave = (lambda note, x: copy_to(x, comm)), (lambda note, x: reduce_from(x, comm))
    parts = []
    for whole in given["weights"]:
        up, down = (np.array_split(matrix, comm.size)[comm.rank] for matrix in whole)
        bend, flat = (
            (lambda note, x, up: note(torch.tanh(note(x @ up.T)))),
            (lambda note, x, down: note(x @ down)),
        )
        parts += [
            (Part(enter), True),
            (Part(bend, up), False),
            (Part(flat, down), False),
            (Part(leave), True),
        ]
    up, down = given["weights"][0]
    parts += [(Part(bend, up), False), (Part(lambda note, x, down: x @ down, down), False)]
    x = torch.from_numpy(given["x"].copy()).requires_grad_()
    begin_gradients([x, *(matrix for part, _ in parts for matrix in part.matrices)])
    y = exercise.checkpoint_between(parts, x)
    return forward_and_backward([part for part, _ in parts], x, y) | {"sent": comm.traffic.messages}


def judge_between(
    case: Case, results: Sequence[Arrays], notes: Sequence[Note], counted: bool = True
) -> None:
    """Compare with the stored run, whose messages are those that are needed."""

    @cache
    def wrongly(slip: str) -> list[Any]:
        return minidist.run(
            lambda comm: run_between(Stored(slip), comm, case.given[comm.rank]), case.ranks
        )

    expected = wrongly("")
    for rank, found in enumerate(results):
        compare(
            rank,
            found,
            expected[rank],
            [1, 2, 2, 1] * len(case.given[rank]["weights"]) + [2, 2],
            lambda slip, rank=rank: wrongly(slip)[rank],
        )
        if counted and (sent := len(sent_by(rank, notes))) != (needed := expected[rank]["sent"]):
            raise Wrong(
                f"rank {rank} sent {sent} messages, expected {needed}, as without recomputing"
            )
