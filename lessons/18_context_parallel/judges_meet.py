"""Lesson 18, task 1: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from judges import attention, causal, weights_of
from torch import Tensor

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong

KEYS = (0, 4, 9, 12)  # of task 1: the first block ends with 4 keys, and its mask is causal


def seen_blocks(given: Arrays) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield key, value and mask of each block of task 1."""
    key, value = torch.tensor(given["key"]), torch.tensor(given["value"])
    for first, last in pairwise(KEYS):
        mask = (
            causal(last)
            if first == 0
            else torch.ones(given["query"].shape[2], last - first, dtype=torch.bool)
        )
        yield key[:, :, first:last], value[:, :, first:last], mask


def run_meet(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Meet blocks one after the other; the result lies in a larger tensor, as in a rank of which a
    part takes part.
    """
    query = torch.tensor(given["query"])
    batch, heads, time, size = query.shape
    output = torch.zeros(batch, heads, 2 * time, size).double()[:, :, time:]
    lse = torch.full((batch, heads, 2 * time), -torch.inf).double()[:, :, time:]
    for number, (key, value, _) in enumerate(seen_blocks(given)):
        with contract.untouched(query=query, key=key, value=value):
            returned = exercise.meet(query, output, lse, key, value, number == 0)
        if returned is not None:
            raise Wrong(
                "meet returns something: it changes output and lse in place, and returns nothing"
            )
    return {"output": output.numpy(), "lse": lse.numpy()}


def judge_meet(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As over all keys at once."""
    given = case.given[0]
    query = torch.tensor(given["query"])
    keys, values, masks = zip(*seen_blocks(given), strict=True)
    scores, whole = weights_of(query, torch.cat(keys, 2), torch.cat(masks, 1))
    output, _ = attention(query, torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 1))
    each = [attention(query, *block) for block in zip(keys, values, masks, strict=True)]
    outputs, lses = (torch.stack(list(them)) for them in zip(*each, strict=True))
    half = outputs[0]
    for more in outputs[1:]:
        half = (half + more) / 2
    by_keys = sum(out * key.shape[2] for out, key in zip(outputs, keys, strict=True)) / KEYS[-1]
    instead = {
        "the blocks' outputs are added, without weights": outputs.sum(0).numpy(),
        "the two outputs are averaged, without weights": half.numpy(),
        "the blocks' outputs are averaged, without weights": outputs.mean(0).numpy(),
        "each block is weighted by its number of keys, not by exp(lse)": by_keys.numpy(),
        "the last block replaces what was there": outputs[-1].numpy(),
        "each output is weighted with its lse, not with exp(lse)": partial(by_lse, outputs, lses),
        "the weights of the two outputs are exchanged": partial(fold, outputs, lses, turned=True),
        "lse is not brought up to date: each block is weighed against the first alone": partial(
            fold, outputs, lses, stays=True
        ),
        "lse becomes that of the last block: what was there before weighs too little": partial(
            fold, outputs, lses, last=True
        ),
        "lse becomes the larger of the two, not log(exp(a) + exp(b)): what was there weighs "
        "too little": partial(fold, outputs, lses, larger=True),
        "the mask of the block is not passed on: its queries see later keys": plain_attention(
            query, keys, values
        ),
        **{clause: partial(weighed, outputs, lses, how) for how, clause in WEIGHED.items()},
    }
    found = results[0]["output"], results[0]["lse"]
    if np.isneginf(found[1]).all():
        raise Wrong(
            "rank 0: lse is still -inf when blocks have been met: it is to be brought up to date, "
            "too, and what is added to -inf stays -inf; log(exp(a) + exp(b)) is wanted"
        )
    for name, array in zip(("output", "lse"), found, strict=True):
        if (array != array).any():
            raise Wrong(
                f"rank 0: {name} is not a number where scores reach {scores.max():.0f}: exp(lse) "
                "is infinite there, and infinity by infinity is nothing; form lse' - lse first, "
                "and weigh by a function of it"
            )
    contract.expect_close(0, "output", found[0], output.numpy(), instead=instead)
    instead = {
        "it is not brought up to date": lses[0].numpy(),
        "it is that of the last block": lses[-1].numpy(),
        "those of the blocks are added: log(exp(a) + exp(b)) is wanted": lses.sum(0).numpy(),
        "the largest of the blocks' is taken: log(exp(a) + exp(b)) is wanted": lses.amax(0).numpy(),
    }
    contract.expect_close(0, "lse", found[1], whole.numpy(), instead=instead)


WEIGHED = {
    "turned": "the weights of the two outputs are exchanged, so the first block is lost",
    "lse first": "lse is brought up to date before the weights are computed, which need the one of before",
    "half": "the two outputs are averaged, without weights, also with the 0 at the beginning",
    "no old": "what was there is not made smaller by its own weight",
    "no new": "the new block's output is not multiplied by its weight",
    "by lse": "each output is weighted with its lse, not with exp(lse)",
    "added": "lse of the two are added: log(exp(a) + exp(b)) is wanted",
}


def weighed(outputs: Tensor, lses: Tensor, how: str) -> Array:
    """Return outputs merged one after the other, from nothing on; `how` is one of `WEIGHED`."""
    total, lse = torch.zeros_like(outputs[0]), torch.full_like(lses[0], -torch.inf)
    for output, its in zip(outputs, lses, strict=True):
        both = torch.logaddexp(lse, its)
        weight = torch.sigmoid(its - (both if how == "lse first" else lse))
        weight = {"half": torch.full_like(its, 0.5), "by lse": its / (its + lse)}.get(how, weight)[
            ..., None
        ]
        old, new = {
            "turned": (weight, 1 - weight),
            "no old": (1.0, weight),
            "no new": (1 - weight, 1.0),
        }.get(how, (1 - weight, weight))
        total, lse = old * total + new * output, lse + its if how == "added" else both
    return total.numpy()


def plain_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Array:
    """Return attention in which each query sees every key."""
    key, value = torch.cat(list(keys), 2), torch.cat(list(values), 2)
    return attention(query, key, value, torch.ones(query.shape[2], key.shape[2], dtype=torch.bool))[
        0
    ].numpy()


def by_lse(outputs: Tensor, lses: Tensor) -> Array:
    """Return outputs merged one after the other, weighted with lse itself."""
    total, weight = outputs[0], lses[0]
    for output, lse in zip(outputs[1:], lses[1:], strict=True):
        total = (total * weight[..., None] + output * lse[..., None]) / (weight + lse)[..., None]
        weight = torch.logaddexp(weight, lse)
    return total.numpy()


def fold(
    outputs: Tensor,
    lses: Tensor,
    turned: bool = False,
    stays: bool = False,
    last: bool = False,
    larger: bool = False,
) -> Array:
    """Return outputs merged one after the other, with a mistake.

    Weights are `turned`, or lse `stays`, is the `last` block's, or the `larger` one.
    """
    total, weight = outputs[0], lses[0]
    for output, lse in zip(outputs[1:], lses[1:], strict=True):
        total = total.lerp(
            output, torch.sigmoid(weight - lse if turned else lse - weight)[..., None]
        )
        both = torch.maximum(weight, lse) if larger else torch.logaddexp(weight, lse)
        weight = weight if stays else lse if last else both
    return total.numpy()
