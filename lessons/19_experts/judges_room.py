"""Lesson 19, task 3: the programs that ask for room, and that move biases, and their judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from judges import expect_everywhere
from judges_balance import own, places

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.calls import expect_collectives
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong

# ---------------------------------------------------------------- capacity


def run_kept(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Return which of this rank's choices have room."""
    mine = torch.tensor(places(given, comm.size)[comm.rank])
    time, experts = given["choice"].shape[1], int(given["experts"])
    choice = own(given, "choice", comm)
    with contract.untouched(choice=choice, positions=mine):
        room = exercise.kept(choice, mine, time, experts, float(given["factor"]), comm)
    if room.dtype != torch.bool:
        raise Wrong(f"kept returns {room.dtype}: bool is wanted")
    return {"kept": room.numpy()}


def room_for(case: Case, changed: str = "") -> list[Array]:
    """Return by rank which choices have room, with a mistake if one is named."""
    given = case.given[0]
    choice, everyones, factor = given["choice"], given["everyones"], float(given["factor"])
    batch, time, k = choice.shape
    tokens = (
        time // case.ranks
        if changed in ("own", "own tokens")
        else time * (batch if changed == "all" else 1)
    )
    share = (
        (1 if changed == "no factor" else factor)
        * (1 if changed == "no k" else k)
        * tokens
        / int(given["experts"])
    )
    capacity = math.floor(share) if changed == "floor" else math.ceil(share)
    if changed == "rounded first":
        capacity = k * math.ceil(share / k)
    capacity += (changed == "one more") - (changed == "one less")
    by_rank = np.sort(places(given, case.ranks), 1).ravel()
    order = (
        everyones
        if changed in ("arrival", "own")
        else by_rank
        if changed == "own count"
        else np.arange(time)
    )
    order = order[::-1] if changed == "last" else order
    found = np.zeros(choice.shape, dtype=bool)
    served: dict[Any, int] = {}
    asked = [(place, t, j) for place, t in enumerate(order) for j in range(k)]
    if changed == "first choices":
        asked.sort(key=lambda each: each[2])
    for b in range(batch):
        for place, t, j in asked:
            whose = place // (time // case.ranks) if changed in ("own", "own count") else 0
            key = (
                choice[b, t, j],
                0 if changed == "batch" else b,
                whose,
                j if changed == "each choice" else 0,
            )
            found[b, t, j] = served.get(key, 0) < capacity * (batch if changed == "batch" else 1)
            served[key] = served.get(key, 0) + 1
    if changed == "together":
        found &= found.all(-1, keepdims=True)
    if changed == "first decides":
        found &= found[..., :1]
    return [
        ~found[:, mine] if changed == "dropped" else found[:, mine]
        for mine in places(given, case.ranks)
    ]


KEPT_STORIES = {
    "own": "capacity and tokens are counted on each rank alone: what is dropped depends on the "
    "layout then",
    "own tokens": "the capacity is that of this rank's tokens, T', and not that of the sequence, T",
    "own count": "only the tokens of this rank are counted: earlier ones of other ranks take room, too",
    "all": "the capacity is that of all sequences together: C goes by the T tokens of one",
    "no factor": "the factor is left out of C",
    "together": "a token loses all its choices if one of them finds no room: each choice is for itself",
    "first decides": "a token whose first choice finds no room loses the others, too: each choice is for itself",
    "arrival": "tokens are served rank by rank, in the order in which they lie: the order of positions is "
    "wanted",
    "batch": "all sequences of the batch share the room: each sequence has its own",
    "floor": "C is rounded down, where it is rounded up, or a token counts itself among those before it",
    "rounded first": "factor T / E is rounded up before it is multiplied by k; it is rounded once, in the "
    "end",
    "one less": "a token counts itself among those before it: C tokens have room",
    "no k": "the factor k is missing: each of the k choices is one to serve",
    "one more": "one token too many is served: token number C, from 0, is the first that finds no room",
    "last": "the last tokens are served, not the first ones",
    "each choice": "first choices, second choices and so on are counted each by itself: an expert serves C "
    "of all",
    "first choices": "all tokens' first choices are served before the second ones: an expert goes by the "
    "positions of tokens alone",
    "dropped": "true stands for what is dropped: it is to stand for what has room",
}


def judge_kept(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The same choices as on one rank."""
    expect_everywhere(
        "which choices have room",
        [result["kept"].astype(int) for result in results],
        [room.astype(int) for room in room_for(case)],
        {
            story: partial(lambda name: [room.astype(int) for room in room_for(case, name)], name)
            for name, story in KEPT_STORIES.items()
        },
    )
    expect_collectives(notes)


# ---------------------------------------------------------------- the bias


def run_rebalance(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run two steps."""
    layer = exercise.Layer(
        torch.tensor(given["bias"]), torch.zeros(given["bias"].shape, dtype=torch.int64)
    )
    for number, counts in enumerate(given["tallies"]):
        layer.tally = layer.tally + torch.tensor(counts)
        exercise.rebalance(layer, comm)
        if layer.tally.any():
            raise Wrong(f"after step {number} the tally is not zero: rebalance begins a new one")
    if layer.bias.dtype != torch.int64:
        raise Wrong(
            f"the bias is {layer.bias.dtype} after rebalance: it counts changes, so int64 is wanted"
        )
    return {"bias": layer.bias.numpy()}


def biases(case: Case, change: Callable[[Array, Array], Array]) -> list[Array]:
    """Return by rank the bias after all steps; `change` is given counts of all ranks, and a rank's
    own.
    """
    tallies = np.stack([given["tallies"] for given in case.given])
    return [
        given["bias"] + sum(map(change, tallies.sum(0), given["tallies"])) for given in case.given
    ]


def judge_rebalance(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """One up where an expert had less than the mean over all ranks, one down where it had more."""
    sign = np.sign

    def towards(counts: Array) -> Array:
        return sign(counts.mean() - counts).astype(np.int64)

    wrong: dict[str, Callable[[Array, Array], Array]] = {
        "each rank goes by its own tokens: their counts are added up over all ranks": lambda all, own: (
            towards(own)
        ),
        "the bias moves the other way: it rises where an expert had too few": lambda all, own: (
            -towards(all)
        ),
        "the bias moves by two: by one is wanted": lambda all, own: 2 * towards(all),
        "the bias moves by the distance from the mean: by one is wanted": lambda all, own: np.rint(
            all.mean() - all
        ).astype(np.int64),
        "the median decides: it is the mean that counts are compared with": lambda all, own: sign(
            np.median(all) - all
        ).astype(np.int64),
        "an expert at the mean moves as well: it stays": lambda all, own: np.where(
            all < all.mean(), 1, -1
        ),
        "an expert at the mean moves as well, up: it stays": lambda all, own: np.where(
            all > all.mean(), -1, 1
        ),
        "the mean is rounded down to a whole number before counts are compared with it": lambda all, own: (
            sign(all.sum() // len(all) - all)
        ),
        "only experts with too few tokens move": lambda all, own: np.maximum(towards(all), 0),
        "only experts with too many tokens move": lambda all, own: np.minimum(towards(all), 0),
    }
    right = biases(case, lambda all, own: towards(all))
    stories = {story: partial(biases, case, change) for story, change in wrong.items()}
    last = [towards(np.stack([given["tallies"][-1] for given in case.given]).sum(0))] * case.ranks
    stories["the bias begins anew in each step: it goes on from what it was"] = partial(list, last)
    expect_everywhere("the bias", [result["bias"] for result in results], right, stories)
    expect_collectives(notes)
