"""Lesson 05, task 4: the program that clips slices, and its judge."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from judges import ITEM, expect, flat
from torch import Tensor, nn

from minidist import Communicator, Trace
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_close, sent_by


def clipped(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 on the slices that this rank has, some of them empty; note the bytes of each
    collective.
    """
    pieces = [nn.Parameter(torch.zeros(length)) for length in given["lengths"].tolist()]
    pieces = [nn.Parameter(torch.zeros_like(one, dtype=torch.float64)) for one in pieces]
    gradients = [
        part.clone() for part in torch.tensor(given["gradient"]).split(given["lengths"].tolist())
    ]
    for piece, gradient in zip(pieces, gradients, strict=True):
        piece.grad = gradient
    trace = comm.trace = Trace()
    norm = exercise.clip(pieces, float(given["limit"]), comm)
    if not isinstance(norm, Tensor):
        raise Wrong(f"clip returned {type(norm).__name__}, expected a tensor without dims")
    sums = [event.bytes for event in trace.events if event.kind == "collective"]
    others = sum(
        piece.grad is not gradient for piece, gradient in zip(pieces, gradients, strict=True)
    )
    return {
        "norm": norm.detach().numpy(),
        "gradient": flat(gradients),
        "sums": sums,
        "others": others,
    }


def strange_norms(case: Case) -> dict[str, Any]:
    """Return other numbers that may be taken for the norm of all gradients together."""
    slices = [np.split(given["gradient"], np.cumsum(given["lengths"])[:-1]) for given in case.given]
    whole = np.concatenate([given["gradient"] for given in case.given])
    # [rank, slice]
    squares = np.array([[np.square(each).sum() for each in mine] for mine in slices])
    found = {
        "absolute values are added, and not squares": np.abs(whole).sum(),
        "the largest element is taken": np.abs(whole).max(initial=0.0),
        "the sum of squares is divided by the number of ranks": np.sqrt(squares.sum() / case.ranks),
        "the sum of squares is divided by the number of elements": np.sqrt(
            squares.sum() / max(1, len(whole))
        ),
        "the norms of the slices are added, not their squares": np.sqrt(squares).sum(),
        "elements are added, and squared only then": abs(whole.sum()),
    }
    for number in range(squares.shape[1]):
        found[f"only slice {number} of each rank counts"] = np.sqrt(squares[:, number].sum())
        found[f"slice {number} of each rank is left out"] = np.sqrt(
            squares.sum() - squares[:, number].sum()
        )
    return found


def judge_clipped(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """One factor for all, from one norm over all ranks, for one number sent."""
    gradients, limit = [given["gradient"] for given in case.given], float(case.given[0]["limit"])
    with np.errstate(invalid="ignore"):
        norms = np.array([np.linalg.norm(each) for each in gradients])
        norm = np.linalg.norm(norms)
        factor = min(1.0, limit / (norm + 1e-6)) if np.isfinite(norm) else 1.0
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        why = "one of one number, on every rank, whatever its slices are"
        if not len(result["sums"]):
            why += ": without one, the norm is that of the rank's own slices"
        expect(f"rank {rank}", "bytes of each collective:", result["sums"], [ITEM], why)
        sent = [note.bytes for note in sent_by(rank, notes)]
        if max(sent, default=0) > ITEM or len(sent) > 2 * case.ranks:
            raise Wrong(
                f"rank {rank} sent messages of {sent} bytes, expected one all-reduce of one "
                f"number ({ITEM} bytes)"
            )
        mine, slices = (
            given["gradient"],
            np.split(given["gradient"], np.cumsum(given["lengths"])[:-1]),
        )
        if not np.isfinite(norm):
            expect(f"rank {rank}", "dims of the norm:", np.array(result["norm"].ndim), 0)
            if np.isfinite(result["norm"]):
                raise Wrong(
                    f"rank {rank}: the norm is {result['norm']}, expected {norm}, as one rank's "
                    "gradient is"
                )
            changed = np.flatnonzero(
                ~((result["gradient"] == mine) | (np.isnan(mine) & np.isnan(result["gradient"])))
            )
            if len(changed):
                raise Wrong(
                    f"rank {rank}: with a norm of {norm}, {len(changed)} elements of the gradient "
                    "were changed, expected none: is what is not a number looked for, as well as "
                    "infinity?"
                )
            continue
        wrong = {
            "the ranks' norms are added, not their squares": norms.sum(),
            "each rank takes the norm of its own slices": norms[rank],
            "the norm after clipping is returned": min(norm, limit)
            if result["norm"] == limit
            else norm * factor,
            "the root is not taken": norm**2,
            "the ranks' largest norm is taken, not the root of the sum of their squares": norms.max(),
            **strange_norms(case),
            "1e-6 is added to the norm that is returned: it belongs into the factor": norm + 1e-6,
        }
        if result["norm"].shape == (1,):
            raise Wrong(
                f"rank {rank}: the norm has shape (1,), expected a tensor without dims: squeeze() "
                "it"
            )
        expect_close(rank, "the norm", result["norm"], np.array(norm), instead=wrong)

        def by_norm(other: float, mine: Array = mine) -> Array:
            return mine * min(1.0, limit / (other + 1e-6))

        scaled = {
            "the ranks' norms are added, not their squares": by_norm(norms.sum()),
            "each rank scales by the norm of its own slices": by_norm(norms[rank]),
            "the ranks' largest norm is taken": by_norm(norms.max()),
            "the factor is limit / norm, without the 1e-6": mine
            * min(1.0, limit / max(norm, 1e-300)),
            "what is short enough is scaled up": mine * limit / (norm + 1e-6),
            "each element is limited by itself, as by clamp": np.clip(mine, -limit, limit),
            "gradients are divided by the norm, and not multiplied by the limit": mine
            / (norm if norm > limit else 1),
            "they are scaled twice": mine * min(1.0, limit / (norm + 1e-6)) ** 2,
            "they are scaled by the limit alone": mine * limit,
            "they are divided by the square of the norm": mine * min(1.0, limit / (norm**2 + 1e-6)),
            "each slice is scaled by its own norm": np.concatenate(
                [each * min(1.0, limit / (np.linalg.norm(each) + 1e-6)) for each in slices]
            ),
        }
        if result["others"] and not np.array_equal(result["gradient"], factor * mine):
            raise Wrong(
                f"rank {rank}: slice.grad is another tensor than before for {result['others']} "
                "slices, expected the one that is there to be scaled in place"
            )
        expect_close(
            rank, "the gradient", result["gradient"], factor * mine, instead=scaled, before=mine
        )
