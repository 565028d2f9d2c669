"""Lesson 19, task 3: the programs that balance the experts' load, and their judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from judges import expect_everywhere
from torch import Tensor

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.calls import expect_collectives
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong

COUNTS = 1e-6  # of fractions: whole numbers divided by each other are float32


def own(given: Arrays, name: str, comm: Communicator) -> Tensor:
    """Return this rank's tokens of an array [B, T, ...]."""
    return torch.tensor(given[name][:, places(given, comm.size)[comm.rank]])


def places(given: Arrays, ranks: int) -> Array:
    """Return by rank which positions it has."""
    return given["everyones"].reshape(ranks, -1)


def counted(choice: Array, experts: int) -> Array:
    """Return how many of the choices [B, T, k] fall on each expert: [B, E]."""
    return np.stack([np.bincount(each.ravel(), minlength=experts) for each in choice])


# ---------------------------------------------------------------- the auxiliary loss


def run_loss(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Return this rank's share of the loss, and the gradient of its scores."""
    scores = own(given, "scores", comm).requires_grad_()
    loss = exercise.balance_loss(scores, own(given, "choice", comm), comm)
    if loss.dim() or not loss.requires_grad:
        raise Wrong(f"balance_loss returns {tuple(loss.shape)}: a scalar with gradients is wanted")
    loss.backward()
    return {"loss": loss.item(), "gradient": scores.grad.numpy()}


def fractions(case: Case, rank: int, changed: str = "") -> Array:
    """Return what the gradient of a rank's scores should be [B, T', E]: E f_e, with a mistake if one is named."""
    given = case.given[0]
    mine = places(given, case.ranks)[rank]
    choice, experts = given["choice"], given["scores"].shape[-1]
    counts = counted(choice[:, mine] if changed == "own" else choice, experts)
    if changed == "batch":
        counts = np.broadcast_to(counts.sum(0), counts.shape)
    if changed == "own batch":
        counts = np.broadcast_to(counted(choice[:, mine], experts).sum(0), counts.shape)
    by = counts.sum(1, keepdims=True) / (choice.shape[2] if changed == "over tokens" else 1)
    if changed == "over own":
        by = by / case.ranks
    factor = 1 if changed == "no E" else experts
    found = np.broadcast_to((factor * counts / by)[:, None], (len(choice), len(mine), experts))
    scale = {"mean": 1 / choice.shape[1], "mean of all": 1 / choice.shape[1] / len(choice)}
    scale["own mean"] = 1 / len(mine)
    return found * scale.get(changed, 1)


LOSS_STORIES = {
    "own": "the fractions are those of the tokens that this rank happens to have: add up those of a sequence's ranks",
    "batch": "the fractions are those of all sequences together: each sequence has its own",
    "own batch": "the fractions are those of all tokens of this rank together: each sequence has its own, on all ranks",
    "no E": "the factor E is missing: the loss of even load is to be 1 a token",
    "over tokens": "the counts are divided by T, not by k T: fractions of all choices add up to 1",
    "over own": "the counts of all ranks are divided by the choices of this rank's tokens",
    "mean": "the mean over a sequence's tokens is taken: the sum over this rank's tokens is wanted",
    "own mean": "the mean over this rank's tokens is taken: their sum is wanted",
    "mean of all": "the mean over all tokens is taken: the sum over this rank's tokens is wanted",
}


def judge_loss(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank's share, and its gradient, which is E f_e."""
    given = case.given[0]
    scores = [given["scores"][:, mine] for mine in places(given, case.ranks)]

    def gradients(changed: str = "") -> list[Array]:
        return [fractions(case, rank, changed) for rank in range(case.ranks)]

    def losses(changed: str = "") -> list[Array]:
        return [np.array((g * s).sum()) for g, s in zip(gradients(changed), scores, strict=True)]

    expect_everywhere(
        "the loss",
        [np.array(float(result["loss"])) for result in results],
        losses(),
        {story: partial(losses, name) for name, story in LOSS_STORIES.items()},
        COUNTS,
    )
    expect_everywhere(
        "the gradient of the scores",
        [result["gradient"] for result in results],
        gradients(),
        {story: partial(gradients, name) for name, story in LOSS_STORIES.items()}
        | {"gradients flow through the fractions, which are counts": lambda: [2 * g for g in gradients()]},
        COUNTS,
    )
    expect_collectives(notes)


# ---------------------------------------------------------------- a loss that is attached, and counts


def run_attach(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Train two microbatches, recomputed or not; between them a forward in evaluation."""
    layer = exercise.Layer(*(torch.zeros(given["counts"].shape[1], dtype=torch.int64) for _ in range(2)))
    logits = torch.tensor(given["logits"], requires_grad=True)
    found: dict[str, Any] = {"kept": True}

    def model(logits: Tensor, counts: Tensor) -> Tensor:
        weights = logits.softmax(-1)
        loss = (torch.tensor(given["auxiliary"]) * logits).sum()
        attached = exercise.attach(weights, loss, layer, counts)
        found["kept"] &= torch.equal(attached, weights)
        return (attached * torch.tensor(given["gradient"])).sum()

    first, second, unseen = torch.tensor(given["counts"])
    for counts in (first, second):
        if given["recomputed"]:
            model(logits, counts)  # what recomputation does: this graph is forgotten, and made again for backward
        model(logits, counts).backward()
        with torch.no_grad():
            model(logits, unseen)
    return found | {"gradient": logits.grad.numpy(), "tally": layer.tally.numpy(), "bias": layer.bias.numpy()}


def judge_attach(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The gradient of both losses, and each token counted once."""
    given, result = case.given[0], results[0]
    if not result["kept"]:
        raise Wrong("attach changes the weights: its forward returns them as they are")
    logits = torch.tensor(given["logits"], requires_grad=True)
    upstream = torch.tensor(given["gradient"])
    (logits.softmax(-1) * upstream).sum().backward()
    main = 2 * logits.grad.numpy()  # two microbatches
    aux = 2 * given["auxiliary"]
    contract.expect_close(
        0,
        "the gradient of the scores",
        result["gradient"],
        main + aux,
        instead={
            "the auxiliary loss is never attached: backward goes past it": main,
            "the gradient of the weights is lost": aux,
            "the loss gets the sum of the weights' gradient, where it should get 1": main + aux * upstream.sum().item(),
            "the loss gets the mean of the weights' gradient, where it should get 1": (
                main + aux * upstream.mean().item()
            ),
            "the loss counts in forward, too, or twice": main + 2 * aux,
            "the loss is subtracted": main - aux,
        },
    )
    first, second, unseen = given["counts"]
    both = first + second
    again = (
        "choices are counted in forward, which recomputation runs twice and evaluation runs as well: count in backward"
    )
    contract.expect_equal(
        0,
        "the tally",
        result["tally"],
        both,
        instead={
            "nothing is counted": 0 * both,
            again: (2 if given["recomputed"] else 1) * both + 2 * unseen,
            "choices are counted in each forward that has gradients: recomputation runs it twice": 2 * both,
            "only the last microbatch is counted: a step has several": second,
            "choices are counted in evaluation, too": both + 2 * unseen,
        },
    )
    if result["bias"].any():
        raise Wrong("attach changes the bias: it moves once a step, in `rebalance`")


# ---------------------------------------------------------------- capacity


def run_kept(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Return which of this rank's choices have room."""
    mine = torch.tensor(places(given, comm.size)[comm.rank])
    time, experts = given["choice"].shape[1], int(given["experts"])
    room = exercise.kept(own(given, "choice", comm), mine, time, experts, float(given["factor"]), comm)
    if room.dtype != torch.bool:
        raise Wrong(f"kept returns {room.dtype}: bool is wanted")
    return {"kept": room.numpy()}


def room_for(case: Case, changed: str = "") -> list[Array]:
    """Return by rank which choices have room, with a mistake if one is named."""
    given = case.given[0]
    choice, everyones, factor = given["choice"], given["everyones"], float(given["factor"])
    batch, time, k = choice.shape
    tokens = time // case.ranks if changed in ("own", "own tokens") else time
    share = factor * (1 if changed == "no k" else k) * tokens / int(given["experts"])
    capacity = math.floor(share) if changed == "floor" else math.ceil(share)
    capacity += changed == "one more"
    order = everyones if changed in ("arrival", "own") else np.arange(time)
    order = order[::-1] if changed == "last" else order
    found = np.zeros(choice.shape, dtype=bool)
    served: dict[Any, int] = {}
    for b in range(batch):
        for place, t in enumerate(order):
            for j in range(k):
                whose = place // (time // case.ranks) if changed == "own" else 0
                key = (choice[b, t, j], 0 if changed == "batch" else b, whose, j if changed == "each choice" else 0)
                found[b, t, j] = served.get(key, 0) < capacity * (batch if changed == "batch" else 1)
                served[key] = served.get(key, 0) + 1
    return [~found[:, mine] if changed == "dropped" else found[:, mine] for mine in places(given, case.ranks)]


KEPT_STORIES = {
    "own": "capacity and tokens are counted on each rank alone: what is dropped depends on the layout then",
    "own tokens": "the capacity is that of this rank's tokens, T', and not that of the sequence, T",
    "arrival": "tokens are served rank by rank, in the order in which they lie: the order of positions is wanted",
    "batch": "all sequences of the batch share the room: each sequence has its own",
    "floor": "C is rounded down: it is rounded up",
    "no k": "the factor k is missing: each of the k choices is one to serve",
    "one more": "one token too many is served: token number C, from 0, is the first that finds no room",
    "last": "the last tokens are served, not the first ones",
    "each choice": "first choices, second choices and so on are counted each by itself: an expert serves C of all",
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
    layer = exercise.Layer(torch.tensor(given["bias"]), torch.zeros(given["bias"].shape, dtype=torch.int64))
    for number, counts in enumerate(given["tallies"]):
        layer.tally = layer.tally + torch.tensor(counts)
        exercise.rebalance(layer, comm)
        if layer.tally.any():
            raise Wrong(f"after step {number} the tally is not zero: rebalance begins a new one")
    if layer.bias.dtype != torch.int64:
        raise Wrong(f"the bias is {layer.bias.dtype} after rebalance: it counts changes, so int64 is wanted")
    return {"bias": layer.bias.numpy()}


def biases(case: Case, change: Callable[[Array, Array], Array]) -> list[Array]:
    """Return by rank the bias after all steps; `change` is given counts of all ranks, and a rank's own."""
    tallies = np.stack([given["tallies"] for given in case.given])
    return [given["bias"] + sum(map(change, tallies.sum(0), given["tallies"])) for given in case.given]


def judge_rebalance(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """One up where an expert had less than the mean over all ranks, one down where it had more."""
    sign = np.sign

    def towards(counts: Array) -> Array:
        return sign(counts.mean() - counts).astype(np.int64)

    wrong: dict[str, Callable[[Array, Array], Array]] = {
        "each rank goes by its own tokens: their counts are added up over all ranks": lambda all, own: towards(own),
        "the bias moves the other way: it rises where an expert had too few": lambda all, own: -towards(all),
        "the bias moves by the distance from the mean: by one is wanted": lambda all, own: np.rint(
            all.mean() - all
        ).astype(np.int64),
        "the median decides: it is the mean that counts are compared with": lambda all, own: sign(
            np.median(all) - all
        ).astype(np.int64),
        "an expert at the mean moves as well: it stays": lambda all, own: np.where(all < all.mean(), 1, -1),
        "an expert at the mean moves as well, up: it stays": lambda all, own: np.where(all > all.mean(), -1, 1),
        "only experts with too few tokens move": lambda all, own: np.maximum(towards(all), 0),
        "only experts with too many tokens move": lambda all, own: np.minimum(towards(all), 0),
    }
    expect_everywhere(
        "the bias",
        [result["bias"] for result in results],
        biases(case, lambda all, own: towards(all)),
        {story: partial(biases, case, change) for story, change in wrong.items()},
    )
    expect_collectives(notes)
