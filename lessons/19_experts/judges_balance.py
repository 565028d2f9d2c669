"""Lesson 19, task 3: the programs that balance the experts' load, and their judges."""

from __future__ import annotations

from collections.abc import Sequence
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
    choice = own(given, "choice", comm)
    with contract.untouched(choice=choice):
        loss = exercise.balance_loss(scores, choice, comm)
    if loss.dim() or not loss.requires_grad:
        raise Wrong(f"balance_loss returns {tuple(loss.shape)}: a scalar with gradients is wanted")
    loss.backward()
    return {"loss": loss.item(), "gradient": scores.grad.numpy()}


def fractions(case: Case, rank: int, changed: str = "") -> Array:
    """Return what the gradient of a rank's scores should be [B, T', E]: E f_e, with a mistake if
    one is named.
    """
    given = case.given[0]
    mine = places(given, case.ranks)[rank]
    choice, experts = given["choice"], given["scores"].shape[-1]
    counts = counted(choice[:, mine] if changed == "own" else choice, experts)
    if changed == "first":
        counts = counted(choice[..., :1], experts)
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
    "own": "the fractions are those of the tokens that this rank happens to have: add up those of a "
    "sequence's ranks",
    "batch": "the fractions are those of all sequences together: each sequence has its own",
    "own batch": "the fractions are those of all tokens of this rank together: each sequence has its own, on "
    "all ranks",
    "first": "only first choices are counted: fractions are those of all k T choices",
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

    def soft() -> list[Array]:
        return [np.array((s.shape[-1] * s.mean(1, keepdims=True) * s).sum()) for s in scores]

    expect_everywhere(
        "the loss",
        [np.array(float(result["loss"])) for result in results],
        losses(),
        {story: partial(losses, name) for name, story in LOSS_STORIES.items()}
        | {
            "scores take the place of the counts: f_e counts choices": soft,
            "each rank returns the loss of all tokens: its share is that of its own": lambda: (
                [np.array(sum(losses()))] * case.ranks
            ),
        },
        COUNTS,
    )
    expect_everywhere(
        "the gradient of the scores",
        [result["gradient"] for result in results],
        gradients(),
        {story: partial(gradients, name) for name, story in LOSS_STORIES.items()}
        | {
            "gradients flow through the fractions, which are counts": lambda: [
                2 * g for g in gradients()
            ]
        },
        COUNTS,
    )
    expect_collectives(notes)


# ---------------------------------------------------------------- a loss that is attached, and counts


def run_attach(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Train two microbatches, recomputed or not; between them a forward in evaluation."""
    layer = exercise.Layer(
        *(torch.zeros(given["counts"].shape[1], dtype=torch.int64) for _ in range(2))
    )
    logits = torch.tensor(given["logits"], requires_grad=True)
    found: dict[str, Any] = {"kept": True}

    def model(logits: Tensor, counts: Tensor) -> Tensor:
        weights = logits.sigmoid()
        loss = (torch.tensor(given["auxiliary"]) * logits).sum()
        attached = exercise.attach(weights, loss, layer, counts)
        found["kept"] &= torch.equal(attached, weights)
        return (attached * torch.tensor(given["gradient"])).sum()

    first, second, unseen = torch.tensor(given["counts"])
    for counts in (first, second):
        if given["recomputed"]:
            # what recomputation does: this graph is forgotten, and made again for backward
            model(logits, counts)
        model(logits, counts).backward()
        with torch.no_grad():
            model(logits, unseen)
    return found | {
        "gradient": logits.grad.numpy(),
        "tally": layer.tally.numpy(),
        "bias": layer.bias.numpy(),
    }


def judge_attach(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The gradient of both losses, and each token counted once."""
    given, result = case.given[0], results[0]
    if not result["kept"]:
        raise Wrong("attach changes the weights: its forward returns them as they are")
    logits = torch.tensor(given["logits"], requires_grad=True)
    upstream = torch.tensor(given["gradient"])
    (logits.sigmoid() * upstream).sum().backward()
    main = 2 * logits.grad.numpy()  # two microbatches
    slope = (logits.sigmoid() * (1 - logits.sigmoid())).detach().numpy()
    aux = 2 * given["auxiliary"]
    contract.expect_close(
        0,
        "the gradient of the scores",
        result["gradient"],
        main + aux,
        instead={
            "the auxiliary loss is never attached: backward goes past it": main,
            "the gradient of the weights is lost": aux,
            "1 is added to the gradient of the weights as well": main + aux + 2 * slope,
            "the loss gets the sum of the weights' gradient, where it should get 1": main
            + aux * upstream.sum().item(),
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
        "choices are counted in forward, which recomputation runs twice and evaluation runs "
        "as well: count in backward"
    )
    contract.expect_equal(
        0,
        "the tally",
        result["tally"],
        both,
        instead={
            "nothing is counted": 0 * both,
            again: (2 if given["recomputed"] else 1) * both + 2 * unseen,
            "choices are counted in each forward that has gradients: recomputation runs it twice": 2
            * both,
            "only the last microbatch is counted: a step has several": second,
            "the larger of the counts is kept: they are added up": np.maximum(first, second),
            "choices are counted in evaluation, too": both + 2 * unseen,
        },
    )
    if result["bias"].any():
        raise Wrong("attach changes the bias: it moves once a step, in `rebalance`")
