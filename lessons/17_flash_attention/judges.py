"""Lesson 17, what all tasks share: attention written out, and known slips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minidist.course.grader.contract import Array, Arrays, Wrong, expect_close, known

TILE = 128
QKV = ("query", "key", "value")


def seen_by(queries: int, keys: int, causal: bool) -> Array:
    """Return which keys each query sees."""
    return np.tri(queries, keys, dtype=bool) if causal else np.ones((queries, keys), dtype=bool)


def scores_of(given: Arrays, seen: Array, scale: float | None = None) -> Array:
    """Return all scores, -inf where a key is not seen."""
    query, key = given["query"], given["key"]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return np.where(seen, query @ key.swapaxes(-1, -2) * scale, -np.inf)


def attention(given: Arrays, seen: Array, scale: float | None = None) -> tuple[Array, Array]:
    """Return output and lse."""
    scores = scores_of(given, seen, scale)
    largest = scores.max(-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(all="ignore"):
        return weights @ given["value"] / total, (largest + np.log(total))[..., 0]


def cuts_of(length: int) -> list[slice]:
    """Return where the tiles are."""
    return [slice(start, min(start + TILE, length)) for start in range(0, length, TILE)]


def online(scores: Array, value: Array, cuts: Sequence[slice], slip: str) -> Array:
    """Return the output of an online softmax over cuts of the keys that has a slip."""
    largest = np.full(
        (*scores.shape[:-1], 1), 0.0 if slip in ("from 0", "as they are") else -np.inf
    )
    total, output, parts = (
        np.zeros_like(largest),
        np.zeros((*scores.shape[:-1], value.shape[-1])),
        [],
    )
    with np.errstate(all="ignore"):
        for cut in cuts:
            own = scores[..., cut].max(-1, keepdims=True)
            own = scores[..., cut].max(TOGETHER[slip], keepdims=True) if slip in TOGETHER else own
            now = largest if slip == "as they are" else np.maximum(largest, own)
            apart = slip in ("own", "added", "mean")
            weights, shrink = (
                np.exp(scores[..., cut] - (own if apart else now)),
                np.exp(largest - now),
            )
            parts.append(weights @ value[..., cut, :] / weights.sum(-1, keepdims=True))
            total = total * (1 if slip in ("neither", "own", "values") else shrink) + weights.sum(
                -1, keepdims=True
            )
            output = (
                output * (1 if slip in ("neither", "own", "sum") else shrink)
                + weights @ value[..., cut, :]
            )
            output = output / weights.sum(-1, keepdims=True) if slip == "twice" else output
            largest = now
        if slip in ("added", "mean"):
            return np.sum(parts, 0) / (len(parts) if slip == "mean" else 1)
        return np.asarray(output if slip == "undivided" else output / total)


SLIPS = {
    "the output is not divided by the sum of the weights at the end": "undivided",
    "the sums are not rescaled when a larger score comes": "own",
    "nothing is rescaled when a larger score comes, neither the sum of the weights nor that "
    "of the values": "neither",
    "the sum of the weights is rescaled when a larger score comes, and the weighted values "
    "are not": "sum",
    "the weighted values are rescaled when a larger score comes, and the sum of the weights "
    "is not": "values",
    "the output is divided in every block of keys, and at the end again": "twice",
    "each block of keys has a softmax of its own, and the outputs are added": "added",
    "each block of keys has a softmax of its own, and the outputs are averaged": "mean",
}

TOGETHER = {"one": None, "one a head": (-2, -1)}  # over which dims the largest score is taken
LEAST = -800.0  # exp of less is 0 in float64
BROKEN = {
    "the largest score so far begins at 0, not at -inf: if all scores are far below 0, all "
    "weights are 0": "from 0",
    "exp is taken of the scores as they are, and not of what they are below the largest": "as they are",
    "one largest score serves all queries: the weights of a query whose own scores are far "
    "below are all 0": "one",
    "one largest score of a head serves all of its queries: where a query's own scores are far "
    "below, all its weights are 0": "one a head",
}


def expect_finite(output: Array, given: Arrays, seen: Array, cuts: Sequence[slice]) -> None:
    """Raise `Wrong` if some queries' outputs are no numbers; the mistake that breaks just these is
    named.
    """
    broken = (~np.isfinite(output)).any(-1)
    if not broken.any():
        return
    queries, keys = seen.shape
    masks = {} if seen.all() else wrong_masks(queries, keys)
    rows: dict[str, Any] = {
        story: np.broadcast_to(~mask.any(-1), broken.shape)
        for story, mask in masks.items()
        if not mask.any(-1).all()
    }
    for story, slip in BROKEN.items():
        rows[story] = partial(rows_broken_by, slip, given, seen, cuts)
    clause = known(rows, partial(np.array_equal, broken))
    clause = clause or (
        ": a masked score is -inf, and -inf - (-inf) is not a number" if masks else ""
    )
    raise Wrong(
        f"the output of {broken.sum()} of {broken.size} queries is infinite or not a number{clause}"
    )


def rows_broken_by(slip: str, given: Arrays, seen: Array, cuts: Sequence[slice]) -> Array:
    """Return of which queries a slip makes the output no number."""
    with np.errstate(all="ignore"):
        return np.asarray(
            ~np.isfinite(online(scores_of(given, seen), given["value"], cuts, slip)).all(-1)
        )


def wrong_outputs(
    given: Arrays, seen: Array, cuts: Sequence[slice]
) -> dict[str, Callable[[], Array]]:
    """Return what known mistakes give, by clause."""

    def slipped(slip: str) -> Array:
        with np.errstate(all="ignore"):
            return np.nan_to_num(
                online(scores_of(given, seen), given["value"], cuts, slip), nan=0.0
            )

    def scaled(scale: float) -> Array:
        return attention(given, seen, scale)[0]

    size, keys = given["query"].shape[-1], seen.shape[-1]
    first, last = np.arange(keys) < cuts[0].stop, np.arange(keys) >= cuts[-1].start
    full = np.arange(keys) < max(TILE, keys // TILE * TILE)  # a loop has one tile at least
    sees = {
        "the last tile of keys, which is not full, is left out": full,
        "the last block of keys is left out": ~last,
        "the first block of keys counts only": first,
        "the last block of keys counts only": last,
    }
    wrong = {story: partial(slipped, slip) for story, slip in SLIPS.items()}
    wrong |= {"the scores are not divided by √d": partial(scaled, 1.0)}
    wrong |= {"the scores are divided by d, not by √d": partial(scaled, 1 / size)}
    wrong |= {
        story: partial(lambda mask: attention(given, seen & mask)[0], mask)
        for story, mask in sees.items()
    }
    return wrong


def wrong_masks(queries: int, keys: int) -> dict[str, Array]:
    """Return what is seen with known mistakes of a causal mask."""
    query, key = np.arange(queries)[:, None], np.arange(keys)
    inside, same = key % TILE <= query % TILE, query // TILE == key // TILE
    return {
        "the mask counts from the bottom right, not from the top left": key - keys
        <= query - queries,
        "no key is masked": np.ones((queries, keys), dtype=bool),
        "a query does not see the key of its own place": key < query,
        "a query sees one key too many": key <= query + 1,
        "every tile is masked like the one at the diagonal": (key // TILE <= query // TILE)
        & inside,
        "the tile at the diagonal is not masked": key // TILE <= query // TILE,
        "the tile at the diagonal is left out": key // TILE < query // TILE,
        "the tile at the diagonal counts only": same & inside,
        "the mask hides the keys before a query, and shows those behind it": key >= query,
    }


def wrongly_masked(given: Arrays, seen: Array) -> dict[str, Callable[[], Array]]:
    """Return the outputs of known mistakes with what a causal mask hides, by clause.

    A tile that lies wholly above the diagonal may have been left out, and then needs no mask.
    """
    queries, keys = np.arange(seen.shape[0])[:, None], np.arange(seen.shape[1])
    scores = scores_of(given, np.ones_like(seen))

    def masked_by(value: float, there: Array) -> Array:
        return of_scores(np.where(there, np.where(seen, scores, value), -np.inf), given["value"])

    def too_late(there: Array) -> Array:
        return of_scores(np.where(there, scores, -np.inf), given["value"], seen)

    wrong: dict[str, Callable[[], Array]] = {}
    # where 0 and -1,000 come out alike
    below = (np.where(seen, scores, -np.inf).max(-1) < LEAST).any()
    for there, where in (
        (keys // TILE <= queries // TILE, ""),
        (np.ones_like(seen), ", in every tile"),
    ):
        late = (
            "weights are masked when their sum has been taken, which then has those of masked "
            f"keys{where}"
        )
        wrong[late] = partial(too_late, there)
        for value in (0.0, -100.0, -1000.0, -10000.0):
            number = "a number" if below and value > LEAST else f"{value:,.0f}"
            why = (
                "and exp(0) is a weight like others"
                if number == "0"
                else "and some scores lie below"
            )
            wrong.setdefault(
                f"a masked score becomes {number}, not -inf, {why}{where}",
                partial(masked_by, value, there),
            )
    return wrong


def of_scores(scores: Array, value: Array, kept: Array | bool = True) -> Array:
    """Return softmax(scores) V; of the weights, when they have been divided, only those `kept`."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(np.where(kept, weights / weights.sum(-1, keepdims=True), 0) @ value)


def judge_lse(found: Array, given: Arrays, seen: Array, rank: int = 0) -> None:
    """Raise `Wrong` unless lse is right."""
    scores, lse = scores_of(given, seen), attention(given, seen)[1]
    largest = scores.max(-1)
    total = np.exp(scores - largest[..., None]).sum(-1)
    instead: dict[str, Any] = {
        "the largest score is not added to the logarithm": np.log(total),
        "it is the largest score alone": largest,
        "it is the sum of the weights, not its logarithm": total,
        "it is the logarithm to base 2": lse / np.log(2),
        "the largest score is subtracted from the logarithm": np.log(total) - largest,
        "the logarithm is subtracted from the largest score": largest - np.log(total),
        "the logarithm of the sum is to base 2, and the exponentials are not": largest
        + np.log2(total),
        "the logarithm of the sum is to base 10, and the exponentials are not": largest
        + np.log10(total),
        "it is the sum of the weights, with the largest score added, and not its logarithm": largest
        + total,
        "the largest score is multiplied with the logarithm": largest * np.log(total),
        "the scores are not divided by √d": lambda: attention(given, seen, 1.0)[1],
        "it is of the last tile of keys alone": lambda: attention(
            given, seen & (np.arange(seen.shape[-1]) >= (seen.shape[-1] - 1) // TILE * TILE)
        )[1],
    }
    if found.shape == (*lse.shape, 1):
        raise Wrong(
            f"rank {rank}: lse has shape {found.shape}, expected {lse.shape}: one number a query"
        )
    expect_close(rank, "lse", found, lse, instead=instead)


def expect_tensor(found: Any, what: str, dims: int) -> Tensor:
    """Return a tensor, or raise `Wrong`."""
    if not isinstance(found, Tensor):
        raise Wrong(f"{what} is of type {type(found).__name__}, expected a tensor")
    if found.dim() != dims and not (what == "lse" and found.dim() == 4):
        raise Wrong(f"{what} has shape {tuple(found.shape)}, expected {dims} dimensions")
    return found.detach()


def expect_pair(found: Any) -> dict[str, Any]:
    """Return output and lse by name, or raise `Wrong`."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Wrong(f"a {type(found).__name__} is returned, expected the pair (output, lse)")
    output, lse = found
    return {
        "output": expect_tensor(output, "the output", 4).numpy(),
        "lse": expect_tensor(lse, "lse", 3).numpy(),
    }


def tensors(given: Arrays, names: Sequence[str]) -> list[Tensor]:
    """Return copies as tensors."""
    return [torch.from_numpy(given[name].copy()) for name in names]
