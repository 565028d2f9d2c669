"""Lesson 17, tasks 2 and 3: the programs that run forward, block by block and tile by tile, and
their judges.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from judges import (
    QKV,
    TILE,
    attention,
    cuts_of,
    expect_finite,
    expect_pair,
    judge_lse,
    seen_by,
    tensors,
    wrong_masks,
    wrong_outputs,
    wrongly_masked,
)
from judges_tiles import Meter, expect_tiles, measured
from torch import Tensor

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.contract import Arrays, Case, Figures, Note, Wrong, expect_close


def run_stream(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 on blocks that exist only as long as somebody holds them."""
    [query] = tensors(given, ["query"])
    held: list[int] = []
    born: list[weakref.ref[Any]] = []

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for length in given["lengths"].tolist():
            held.append(sum(ref() is not None for ref in born))
            pair = tuple(
                torch.from_numpy(given[name][:, :, start : start + length].copy())
                for name in QKV[1:]
            )
            born.append(weakref.ref(pair[0].untyped_storage()))
            meter.given |= {tensor.untyped_storage().data_ptr() for tensor in pair}
            start += length
            yield pair[0], pair[1]
            del pair

    with contract.untouched(query=query), torch.no_grad(), Meter(query) as meter:
        found = expect_pair(exercise.attend_stream(query, blocks()))
    return found | measured(meter) | {"held": max(held), "drawn": len(held)}


def judge_stream(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """As attention to all keys at once; and little is held."""
    given, found = case.given[0], results[0]
    lengths = given["lengths"].tolist()
    if (drawn := int(found["drawn"])) != len(lengths):
        raise Wrong(f"{drawn} of {len(lengths)} blocks are taken from the iterator")
    ends = np.cumsum(lengths)
    cuts = [slice(end - length, end) for end, length in zip(ends.tolist(), lengths, strict=True)]
    seen = seen_by(given["query"].shape[2], int(ends[-1]), False)
    wrong = wrong_outputs(given, seen, cuts)
    expect_finite(found["output"], given, seen, cuts)
    expect_close(0, "the output", found["output"], attention(given, seen)[0], instead=wrong)
    judge_lse(found["lse"], given, seen)
    if (held := int(found["held"])) > 1:
        raise Wrong(
            f"{held} earlier blocks are held when a block comes, expected at most the one before"
        )
    output, scores = (
        given["query"].nbytes,
        8 * seen[..., : max(lengths)].size * int(np.prod(given["query"].shape[:2])),
    )
    most = 6 * (output + output // given["query"].shape[2] * max(lengths)) + 4 * scores
    if (peak := int(found["peak"])) > most:
        raise Wrong(
            f"{peak:,} bytes are held at a time besides the arguments, expected at most {most:,}: "
            f"of {len(lengths)} blocks there stay one largest score, one sum and one weighted sum "
            "for each query, and nothing else"
        )
    return {"bytes held in a stream of keys": peak}


def run_forward(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3."""
    leaves = tensors(given, QKV)
    kept = contract.untouched(**dict(zip(QKV, leaves, strict=True)))
    with kept, torch.no_grad(), Meter(*leaves) as meter:
        found = expect_pair(exercise.flash_forward(*leaves, bool(given["causal"])))
    return found | measured(meter)


def judge_forward(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """As attention written out, tile by tile."""
    given, found = case.given[0], results[0]
    queries, keys = given["query"].shape[2], given["key"].shape[2]
    seen, causal = seen_by(queries, keys, bool(given["causal"])), bool(given["causal"])
    wrong: dict[str, Any] = {}
    if causal:
        wrong |= {
            story: partial(lambda mask: np.nan_to_num(attention(given, mask)[0]), mask)
            for story, mask in wrong_masks(queries, keys).items()
        }
        wrong |= wrongly_masked(given, seen)
    wrong |= wrong_outputs(given, seen, cuts_of(keys))
    full = max(TILE, queries // TILE * TILE)
    expected = attention(given, seen)[0]
    cut = np.where(np.arange(queries)[:, None] < full, expected, 0)
    wrong |= {"the last tile of queries, which is not full, is left out": cut}
    output = found["output"]
    if output.shape[2:3] != (queries,) and output.shape[2:3] == (full,):
        raise Wrong(
            f"the output has {full} queries of {queries}: the last tile, which is not full, is "
            "left out"
        )
    expect_finite(output, given, seen, cuts_of(keys))
    expect_close(0, "the output", output, expected, instead=wrong)
    judge_lse(found["lse"], given, seen)
    return {"bytes held by forward": expect_tiles(found, given, 2, 4)}
