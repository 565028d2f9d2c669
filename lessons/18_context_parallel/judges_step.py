"""Lesson 18, task 5: the program that runs beside an answer, and its judge."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from judges import HEADS
from torch import Tensor

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong
from minidist.full.context.gathered import Gathered
from minidist.full.model import Where
from minidist.full.model.gpt import Attend, causal_attention, rotary_table
from minidist.model import rotate

VOCABULARY, WIDTH = 11, 8
MATRICES = {
    "embedding": (VOCABULARY, WIDTH),
    **dict.fromkeys(HEADS, (WIDTH, WIDTH)),
    "head": (WIDTH, VOCABULARY),
}

# ---------------------------------------------------------------- task 4


# ---------------------------------------------------------------- task 5


class Model:
    """One layer of attention, whose keys are rotated by their positions. It has no modules, so it
    begins at once.
    """

    def __init__(self, given: Arrays, attend: Attend) -> None:
        self.weights = {name: torch.tensor(given[name], requires_grad=True) for name in MATRICES}
        self.attend = attend

    def __call__(self, tokens: Tensor, where: Where) -> Tensor:
        """Map tokens [B, T] to logits [B, T, V]."""
        x = F.embedding(tokens, self.weights["embedding"])
        rotary = rotary_table(
            where.position_numbers(tokens.shape[1], x.device), WIDTH // 2, 100.0, x.dtype
        )
        query, key, value = (
            (x @ self.weights[name]).unflatten(-1, (2, -1)).transpose(1, 2) for name in HEADS
        )
        found = self.attend(rotate(query, rotary), rotate(key, rotary), value)
        return (x + found.transpose(1, 2).flatten(2)) @ self.weights["head"]

    def gradient(self) -> Array:
        """Return those of all weights, one behind the other."""
        return torch.cat([weight.grad.flatten() for weight in self.weights.values()]).numpy()


def run_step(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5; the model's attention reaches all ranks."""
    order = ("contiguous", "zigzag", "striped")[int(given["order"])]
    model = Model(given, Gathered(comm, order, causal_attention))
    mine = torch.tensor(given["everyones"]).chunk(comm.size)[comm.rank]
    tokens = torch.tensor(given["tokens"])
    with contract.untouched(tokens=tokens, mine=mine):
        loss = exercise.share_of_the_loss(model, tokens, mine)
    if loss.dim() or not loss.requires_grad:
        raise Wrong(
            f"share_of_the_loss returns {tuple(loss.shape)}: a scalar with gradients is wanted"
        )
    loss.backward()
    return {"loss": loss.item(), "gradient": model.gradient()}


def serial_step(given: Arrays, ranks: int, changed: str = "") -> tuple[float, Array]:
    """Return loss and gradient of the whole batch on one rank, with a mistake if one is named."""
    model, tokens = Model(given, causal_attention), torch.tensor(given["tokens"])
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    time = inputs.shape[1]
    lies, own = torch.tensor(given["everyones"]), time // ranks
    positions = torch.arange(time)
    if changed == "local":
        positions = lies.argsort() % own
    if changed == "contiguous":
        positions = lies.argsort()
    if changed == "neighbours":
        positions = lies.view(ranks, own)[lies.argsort() // own, 0] + lies.argsort() % own
    labelled = (labels != 0).sum()
    if changed == "two further":
        labels = tokens.roll(-2, 1)[:, :-1].clone()
    # the last label wraps round, or does not count
    for mine in lies.chunk(ranks) if "cut first" in changed else ():
        labels[:, mine] = tokens[:, mine].roll(-1, 1)
        labels[:, mine[-1]] *= "wrapped" in changed
    if changed in ("not shifted", "not shifted, by labels"):
        labels = inputs.clone()
    if changed == "first tokens":
        for mine in lies.chunk(ranks):
            inputs = inputs.clone()
            inputs[:, mine] = tokens[:, : len(mine)]
    counts = torch.ones_like(labels, dtype=torch.bool) if changed == "padding" else labels != 0
    counts = inputs != 0 if changed == "inputs" else counts
    losses = F.cross_entropy(
        model(inputs, Where(positions=positions)).transpose(1, 2), labels, reduction="none"
    )
    counts = counts.double()
    weights = counts / counts.sum()
    if changed in ("mean of means", "sum of means"):
        for mine in lies.chunk(ranks):
            weights[:, mine] = (
                counts[:, mine]
                / counts[:, mine].sum()
                / (ranks if changed == "mean of means" else 1)
            )
    if "cut first" in changed and "counted after" not in changed:
        weights = counts / labelled
    if changed == "over inputs":
        weights = counts / (inputs != 0).sum()
    if changed == "over all":
        weights = counts / labels.numel()
    if changed == "sum":
        weights = counts
    divisors = {
        "not shifted, by labels": labelled,
        "over tokens": (tokens != 0).sum(),
        "rows": labelled * len(tokens),
    }
    divisors |= {"ranks": labelled * ranks, "one row": labelled / len(tokens)}
    if changed in divisors:
        weights = counts / divisors[changed]
    if changed == "padding, by labels":
        weights = torch.ones_like(counts) / labelled
    loss = (losses * weights).sum()
    loss.backward()
    return loss.item(), model.gradient()


STEP_STORIES = {
    "mean of means": "each rank takes the mean over its own labels, and the means are averaged: ranks have "
    "different numbers of labels",
    "sum of means": "each rank takes the mean over its own labels: divide by the labels of all ranks",
    "over all": "the sum is divided by all tokens, padding included",
    "padding": "padding counts as a label",
    "inputs": "tokens count that are no padding themselves: those count whose *next* token is none",
    "over inputs": "the sum is divided by the inputs that are no padding: by the labels that are none",
    "sum": "nothing is divided by the number of labels",
    "cut first": "labels are shifted after the cut: the token after a rank's last one is on another rank",
    "cut first, counted after": "labels are shifted and counted after the cut: a rank lacks the token after its last",
    "cut first, wrapped": "labels are shifted after the cut, and wrap round",
    "cut first, wrapped, counted after": "labels are shifted after the cut, and wrap round",
    "padding, by labels": "padding counts as a label in the sum, and not in the number that divides it",
    "over tokens": "the sum is divided by all tokens that are no padding, with the first of each row: by the "
    "labels",
    "rows": "the sum is divided by the number of rows once more",
    "ranks": "the sum is divided by the number of ranks once more",
    "one row": "the sum is divided by the labels of a row on average, not by those of all rows",
    "two further": "labels are the tokens two places further on, not the next ones",
    "first tokens": "each rank computes the first tokens of the rows, not those at its positions",
    "not shifted, by labels": "labels are the inputs themselves, not the tokens after them",
    "not shifted": "labels are the inputs themselves, not the tokens after them",
    "local": "positions count from 0 on every rank: rotation goes by the position in the whole sequence",
    "neighbours": "positions count on from that of the rank's first token: in this order its tokens are no "
    "neighbours",
    "contiguous": "positions are those of contiguous order, and the tokens lie in another",
}


def judge_step(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The shares add up to the loss of the whole batch, and the gradients to its gradient."""
    given = case.given[0]
    loss, gradient = serial_step(given, case.ranks)
    found = np.array(sum(float(result["loss"]) for result in results))
    instead: dict[str, Any] = {
        story: partial(
            lambda changed: np.array(serial_step(given, case.ranks, changed)[0]), changed
        )
        for changed, story in STEP_STORIES.items()
    }
    if any(np.isnan(result["loss"]) for result in results):
        raise Wrong(
            "a share is not a number: a rank whose tokens are all padding divides by none; divide "
            "by the labels of all ranks"
        )
    if case.ranks > 1 and all(abs(float(result["loss"]) - loss) < 1e-9 for result in results):
        raise Wrong(
            "every rank returns the loss of all tokens: its share is that of its own tokens"
        )
    expect_shares(found, np.array(loss), "the shares of all ranks together", instead)
    total = np.sum([result["gradient"] for result in results], axis=0)
    expect_shares(total, gradient, "the gradients of all ranks together", {})


def expect_shares(found: Array, expected: Array, name: str, instead: dict[str, Any]) -> None:
    """Compare a sum over ranks."""
    try:
        contract.expect_close(0, name, found, expected, 1e-9, instead=instead)
    except Wrong as wrong:
        raise Wrong(str(wrong).removeprefix("rank 0: ")) from None
