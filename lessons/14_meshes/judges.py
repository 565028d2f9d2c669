"""Lesson 14: the judges of what the checks' programs found, in the grader's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from minidist.course.grader.contract import Arrays, Case, Note, Wrong, expect_close, known

AXES = {2: ("dp", "tp"), 3: ("dp", "pp", "tp"), 4: ("dp", "pp", "cp", "tp")}
SIZES = ("layers", "hidden", "intermediate", "tokens", "microbatches", "itemsize")
KINDS = tuple(product((True, False), repeat=2))  # cut, tied


def named(sizes: Sequence[int]) -> dict[str, int]:
    """Return the sizes of the axes by name."""
    return dict(zip(AXES[len(sizes)], map(int, sizes), strict=True))


def squares_of(values: Any, kinds: Sequence[tuple[bool, bool]] = KINDS) -> Any:
    """Return the sum of squares that each rank counts [pp, tp], of `values` [pp, tp, kind,
    elements].
    """
    squares = np.zeros(values.shape[:2])
    for kind, (cut, tied) in enumerate(kinds):
        once = (values[:, :, kind] ** 2).sum(axis=-1)[: 1 if tied else None, : None if cut else 1]
        squares[: len(once), : once.shape[1]] += once
    return squares


def norm_of(values: Any, kinds: Sequence[tuple[bool, bool]] = KINDS) -> float:
    """Return the norm of `values` [pp, tp, kind, elements], with what several ranks hold counted
    once.
    """
    return float(squares_of(values, kinds).sum() ** 0.5)


def groups_of(sizes: Sequence[int], order: Any = "C") -> dict[str, list[list[int]]]:
    """Return the group of every rank along every axis; in order F ranks count up along the first
    axis first.
    """
    array, found = np.arange(prod(sizes)).reshape(sizes, order=order), {}
    for number, axis in enumerate(named(sizes)):
        rows = sorted(np.moveaxis(array, number, -1).reshape(-1, sizes[number]).tolist())
        found[axis] = [next(row for row in rows if rank in row) for rank in range(array.size)]
    return found


def bytes_along(dp: int, pp: int, tp: int, stage: int, model: Sequence[int]) -> dict[str, Any]:
    """Return the bytes of task 2, from the number of places where something is sent."""
    layers, hidden, intermediate, tokens, microbatches, itemsize = model
    activation = tokens * hidden * itemsize
    held = ((4 * hidden**2 + 3 * hidden * intermediate) // tp + 2 * hidden) * (layers // pp)
    crossings, places = (
        microbatches * ((stage + 1 < pp) + (stage > 0)),
        microbatches * 4 * (layers // pp),
    )
    along_tp = places * 2 * (tp - 1) * activation // tp
    return {
        "dp": 2 * (dp - 1) * held * itemsize // dp,
        "pp": crossings * activation,
        "tp": along_tp,
    }


def miscounted(
    dp: int, pp: int, tp: int, stage: int, model: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Return what known mistakes give along each axis."""
    layers, hidden, intermediate, tokens, microbatches, itemsize = model
    right, activation = bytes_along(dp, pp, tp, stage, model), tokens * hidden * itemsize
    matrices, mine, ring = (
        4 * hidden**2 + 3 * hidden * intermediate,
        layers // pp,
        2 * (dp - 1) * itemsize,
    )
    buffer, places = (
        ((matrices // tp) + 2 * hidden) * mine * itemsize,
        4 * mine * microbatches * activation,
    )

    def reduced(matrices: int, norms: int = 2 * hidden) -> float:
        return ring * mine * (matrices / tp + norms) / dp

    both, ways = microbatches * activation * (pp > 1), (stage + 1 < pp) + (stage > 0)
    several = {
        "{} is in elements, not in bytes": 1 / itemsize,
        "{} is divided by tp once more": 1 / tp,
        "{} is divided by dp once more": 1 / dp,
        "{} is divided by pp once more": 1 / pp,
        "{} is that of all tp ranks": tp,
        "{} is that of all dp ranks": dp,
        "{} is that of all stages: a rank has layers / pp of the layers": pp,
        "{} counts once for each of the microbatches": microbatches,
        "{} is that of one microbatch": 1 / microbatches,
        "{} counts once for each layer of the stage": mine,
        "{} is that of one layer": 1 / mine,
        "an activation has tokens x F elements; it has tokens x D": intermediate / hidden,
        "{} counts itemsize twice": itemsize,
    }
    what = {"dp": "the buffer of gradients", "pp": "what is sent", "tp": "what is sent"}
    found: dict[str, dict[str, float]] = {
        "dp": {
            "an all-reduce sends the buffer twice; a ring sends it 2 (P - 1)/P times": 2
            * buffer
            * (dp > 1),
            "an all-reduce sends the buffer once; a ring sends it 2 (P - 1)/P times": buffer
            * (dp > 1),
            "an all-reduce sends the buffer (P - 1)/P times": right["dp"] / 2,
            "each of the 2 (P - 1) steps sends the whole buffer; it is 1/P of it": 2
            * (dp - 1)
            * buffer,
            "each of P - 1 steps sends the whole buffer": (dp - 1) * buffer,
            "the ring has tp ranks; it has dp": 2 * (tp - 1) * buffer / tp,
            "gradients are reduced in every microbatch": right["dp"] * microbatches,
            "the norms are cut along tp": reduced(matrices, 2 * hidden // tp) if tp > 1 else -1,
            "the norms are forgotten": reduced(matrices, 0),
            "there is one norm in a layer; there are two": reduced(matrices, hidden),
            "tp does not cut the matrices": reduced(matrices * tp),
            "every rank holds the whole model": ring * layers * (matrices + 2 * hidden) / dp,
            "the MLP has two matrices; it has three": reduced(matrices - hidden * intermediate),
            "attention has three matrices; it has four": reduced(matrices - hidden**2),
            "attention is left out": reduced(matrices - 4 * hidden**2),
            "the MLP is left out": reduced(4 * hidden**2),
            "the MLP's matrices are D x D": reduced(7 * hidden**2),
            "each matrix of the MLP is cut, and those of attention are not": reduced(
                matrices + 4 * hidden**2 * (tp - 1)
            ),
        },
        "pp": {
            "every stage sends both ways": 2 * both,
            "every stage sends one way": both,
            "the last stage sends to the first, too: stages are no ring": (ways + (stage == pp - 1))
            * both,
            "only activations are sent, and no gradients": both * (stage + 1 < pp),
            "only gradients are sent, and no activations": both * (stage > 0),
            "activation and gradient both go to the next stage, if there is one": 2
            * both
            * (stage + 1 < pp),
            "activation and gradient both go to the stage before, if there is one": 2
            * both
            * (stage > 0),
            "what is received counts as well": 2 * right["pp"],
            "one microbatch crosses in a step": right["pp"] / microbatches,
            "it is that of all stages together": 2 * (pp - 1) * microbatches * activation,
        },
        "tp": {
            "there are two places a layer, not four, or an all-reduce sends the buffer (P - "
            "1)/P times": right["tp"] / 2,
            "there is one place a layer, not four": right["tp"] / 4,
            "there are three places a layer, not four": right["tp"] * 3 / 4,
            "there are six places a layer, not four": right["tp"] * 3 / 2,
            "there are eight places a layer, not four": right["tp"] * 2,
            "an all-reduce sends the buffer twice; a ring sends it 2 (P - 1)/P times": 2
            * places
            * (tp > 1),
            "an all-reduce sends the buffer once; a ring sends it 2 (P - 1)/P times": places
            * (tp > 1),
            "each of the 2 (P - 1) steps sends the whole buffer; it is 1/P of it": 2
            * (tp - 1)
            * places,
            "the ring has dp ranks; it has tp": 2 * (dp - 1) * places / dp,
            "every rank has all layers": right["tp"] * pp,
            "there is one microbatch": right["tp"] / microbatches,
        },
    }
    for axis, ways_to_fail in found.items():
        ways_to_fail |= {
            clause.format(what[axis]): right[axis] * factor
            for clause, factor in several.items()
            if factor != 1
        }
    return found


def judge_counted(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each axis of each stage."""
    sizes, model = case.given[0]["sizes"].tolist(), case.given[0]["model"].tolist()
    answers = results[0]["bytes"].tolist()
    for stage, answer in enumerate(answers):
        for number, (axis, expected) in enumerate(bytes_along(*sizes, stage, model).items()):
            if (found := answer[number]) != expected:
                asked = (
                    f"bytes_per_step({named(sizes)}, {stage}, "
                    f"**{dict(zip(SIZES, model, strict=True))})"
                )
                each = [miscounted(*sizes, stage, model)[axis] for stage in range(len(answers))]
                ways = {clause: [one.get(clause, -1) for one in each] for clause in each[stage]}
                along = [one[number] for one in answers]
                why = known(ways, lambda value: np.abs(np.subtract(value, along)).max() < 1)  # noqa: B023
                raise Wrong(f"{asked} says {found} along {axis}, expected {expected}{why}")


def judge_clipped(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The norm of what the serial model has, on every rank, for one number along each axis."""
    (_, pp, tp), limit = map(int, case.given[0]["sizes"]), float(case.given[0]["limit"])
    values = np.stack([given["values"] for given in case.given])
    values = values.reshape(pp, tp, *values.shape[1:])
    norm, instead = (
        norm_of(values),
        {clause: np.array(wrong(values)) for clause, wrong in NORMS.items()},
    )
    scale = limit / (norm + 1e-6) if norm > limit else 1.0
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        own = {"it is that of what this rank has": np.linalg.norm(given["values"])}
        own["it is that after scaling"] = np.array(min(norm, limit))
        expect_close(rank, "the norm", result["norm"], np.array(norm), instead=instead | own)
        expected, found = scale * given["values"], result["values"]
        kept = np.where(found == given["values"], found, expected)
        some = {"some of a rank's gradients are scaled, and others are left as they were": kept}
        some = {} if np.array_equal(found, given["values"]) else some
        factors = {
            "they are multiplied by the limit, not by limit/norm": limit,
            "they are divided by the norm, and not multiplied by the limit": 1 / norm,
            "they are multiplied by norm/limit": norm / limit,
            "they are scaled to the limit although their norm is smaller": limit / (norm + 1e-6)
            if norm < limit
            else 0.0,
            "the factor is that of squares, limit/norm²": limit / norm**2,
            "they are scaled twice": scale**2,
            "the factor goes by the norm of what this rank has": limit
            / np.linalg.norm(given["values"]),
            "1e-6 is not added to the norm": limit / norm if norm > limit else 1.0,
        }
        some |= {clause: factor * given["values"] for clause, factor in factors.items() if factor}
        expect_close(
            rank, "the array given, of kind", found, expected, instead=some, before=given["values"]
        )
        sent, most = sum(note.bytes for note in notes if note.rank == rank), 8 * (pp + tp - 2)
        if sent > most:
            raise Wrong(
                f"rank {rank} sent {sent} bytes, expected no more than {most}: one number for all "
                "gradients"
            )


NORMS: dict[str, Callable[[Any], float]] = {
    "what several ranks have is counted by each of them": lambda values: norm_of(
        values, [(True, False)] * 4
    ),
    "what all of tp have is counted by each of them": lambda values: norm_of(
        values, [(True, tied) for _, tied in KINDS]
    ),
    "what all of pp have is counted by each of them": lambda values: norm_of(
        values, [(cut, False) for cut, _ in KINDS]
    ),
    "what is cut along tp is counted by one rank": lambda values: norm_of(
        values, [(False, tied) for _, tied in KINDS]
    ),
    "what is tied is counted by one, though cut": lambda values: norm_of(
        values, [(c and not t, t) for c, t in KINDS]
    ),
    "the ranks' norms are added, not their squares": lambda values: float(
        (squares_of(values) ** 0.5).sum()
    ),
    "the root is not taken": lambda values: norm_of(values) ** 2,
    "what is not cut counts on each tp rank, and what is cut on one: it is the other way round": lambda values: (
        norm_of(values, [(not cut, tied) for cut, tied in KINDS])
    ),
    "what is tied counts on each stage, and the rest on one: it is the other way round": lambda values: (
        norm_of(values, [(cut, not tied) for cut, tied in KINDS])
    ),
    "only the first stage counts: nothing is added up along pp": lambda values: norm_of(values[:1]),
    "only the first tp rank counts: nothing is added up along tp": lambda values: norm_of(
        values[:, :1]
    ),
    "what is tied is left out": lambda values: norm_of(
        values[:, :, [k for k, (_, tied) in enumerate(KINDS) if not tied]],
        [kind for kind in KINDS if not kind[1]],
    ),
    "what is not cut is left out": lambda values: norm_of(
        values[:, :, [k for k, (cut, _) in enumerate(KINDS) if cut]],
        [kind for kind in KINDS if kind[0]],
    ),
    "magnitudes are added, not squares": lambda values: float(
        squares_of(np.abs(values) ** 0.5).sum()
    ),
    "the root of the sum of magnitudes is taken": lambda values: float(
        squares_of(np.abs(values) ** 0.5).sum() ** 0.5
    ),
    "of a rank's gradients only the largest norm counts, not the sum of squares": lambda values: (
        largest_of(values)
    ),
    "squares are averaged over the ranks, not added": lambda values: (
        norm_of(values) / values[:, :, 0, 0].size ** 0.5
    ),
}


def largest_of(values: Any) -> float:
    """Return the root of the sum of the ranks' largest squares."""
    squares = np.zeros(values.shape[:2])
    for kind, (cut, tied) in enumerate(KINDS):
        once = (values[:, :, kind] ** 2).sum(axis=-1)[: 1 if tied else None, : None if cut else 1]
        some = squares[: len(once), : once.shape[1]]
        some[...] = np.maximum(some, once)
    return float(squares.sum() ** 0.5)
