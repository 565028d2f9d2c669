"""Lesson 19, task 1: the program that routes, and its judge; and what all judges share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.compare import is_close
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong

HALF = 1e-5  # of 16-bit tokens, whose products are rounded to float32
CLEAR = 1e-4  # between the k-th score and the next, so that no rounding decides


def expect_everywhere(
    name: str,
    found: Sequence[Array],
    expected: Sequence[Array],
    instead: Mapping[str, Callable[[], Sequence[Array]]],
    tolerance: float = 1e-9,
) -> None:
    """Hold what each rank has against what it should have; of the mistakes, that which explains
    most ranks is told.
    """
    same = partial(is_close, tolerance=tolerance)
    if all(map(same, found, expected)):
        contract.expect_ranks(name, found, expected, tolerance, instead=instead)
        return
    given = {story: list(of()) for story, of in instead.items()}
    fits = {story: sum(map(same, found, them)) for story, them in given.items()}
    by_fit = sorted(given, key=lambda story: -fits[story])
    contract.expect_ranks(
        name, found, expected, tolerance, instead={story: given[story] for story in by_fit}
    )


# ---------------------------------------------------------------- routing, as it is written


def routed(given: Arrays, changed: str = "") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return choice, weights, and the gradients of tokens and router, with a mistake if one is
    named.
    """
    k, bias = int(given["k"]), torch.tensor(given["bias"]).double()
    x = torch.tensor(given["x"]).double().requires_grad_()
    router = torch.tensor(given["router"]).double().requires_grad_()
    logits = x @ router.T
    if changed == "colder":
        logits = logits / x.shape[1] ** 0.5
    scores = (
        logits.sigmoid()
        if changed == "sigmoid"
        else logits.softmax(0 if changed == "over tokens" else -1)
    )
    told = (
        scores
        if changed == "no bias"
        else logits + bias
        if changed == "bias on products"
        else scores + bias
    )
    if changed == "bias turned":
        told = scores - bias
    if changed == "16 bits":
        told = (x.bfloat16() @ router.bfloat16().T).softmax(-1) + bias
    if changed == "worst":
        told = -told
    numbers = torch.arange(len(router)).flip(0) if changed == "last" else torch.arange(len(router))
    choice = numbers[told.detach()[:, numbers].sort(dim=-1, descending=True, stable=True).indices][
        :, :k
    ]
    taken = told if changed == "biased weights" else logits if changed == "products" else scores
    weights = taken.gather(-1, choice)
    if changed == "chosen alone":
        weights = logits.gather(-1, choice).softmax(-1)
    elif changed == "softmax of scores":
        weights = scores.gather(-1, choice).softmax(-1)
    elif changed == "all tokens":
        weights = weights / weights.sum()
    elif changed == "largest":
        weights = weights / weights.max(-1, keepdim=True).values
    elif changed == "by k":
        weights = weights / k
    elif changed == "ones":
        weights = 0 * weights + 1
    elif changed == "sum is constant":
        weights = weights / weights.sum(-1, keepdim=True).detach()
    elif changed == "over all" or (k > 1 and changed != "raw"):
        weights = weights / (scores if changed == "over all" else weights).sum(-1, keepdim=True)
    (weights * torch.tensor(given["gradient"]).double()).sum().backward()
    assert x.grad is not None and router.grad is not None
    return choice, weights.detach(), x.grad, router.grad


def clear(x: Tensor, router: Tensor, bias: Tensor, k: int) -> Tensor:
    """Return which tokens have a choice that no rounding decides: bool [M]."""
    best = ((x.double() @ router.double().T).softmax(-1) + bias).sort(-1, descending=True).values
    return ((best[:, :k] - best[:, 1 : k + 1]) > CLEAR).all(-1)


def run_route(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    half = bool(given["half"])
    x, router = torch.tensor(given["x"]), torch.tensor(given["router"])
    x, router = (x.bfloat16(), router.float()) if half else (x, router)
    x.requires_grad_()
    router.requires_grad_()
    choice, weights = exercise.route(
        x, router, torch.tensor(given["bias"]).to(router.dtype), int(given["k"])
    )
    if choice.dtype != torch.int64:
        raise Wrong(f"route returns a choice of {choice.dtype}: int64 is wanted")
    if not weights.requires_grad:
        raise Wrong(
            "the weights have no gradient, so nothing teaches the router: do not detach them from "
            "the scores"
        )
    (weights * torch.tensor(given["gradient"])).sum().backward()
    found = {"choice": choice, "weights": weights.detach().double()}
    if weights.dtype != router.dtype:
        raise Wrong(
            f"the weights are {weights.dtype} where tokens are {x.dtype}, expected "
            f"{router.dtype}: products and scores of 16 bits choose other experts, and more than "
            "float32 is more than is asked"
        )
    for name, leaf in (("x", x), ("router", router)):
        if leaf.grad is None:
            raise Wrong(f"backward leaves no gradient of {name}: the weights have to depend on it")
        found[f"gradient of {name}"] = leaf.grad.double()
    return {
        name: value.numpy() if isinstance(value, Tensor) else value for name, value in found.items()
    }


CHOICE_STORIES = {
    "no bias": "the bias is left out when experts are chosen",
    "bias turned": "the bias is subtracted",
    "over tokens": "the softmax is taken over the tokens: a token's scores add up to 1 over the experts",
    "bias on products": "the bias is added to the products, and not to the scores",
    "16 bits": "products are computed in 16 bits: the router chooses other experts then",
    "worst": "the experts with the smallest scores are chosen",
    "last": "of equal scores the expert with the larger number comes first",
}
ALWAYS_1 = (
    "the softmax is taken after the choice, over the chosen expert alone, or its score is divided "
    "by itself: the weight is always 1, and its gradient 0, so the router learns nothing"
)
WEIGHT_STORIES = {
    "biased weights": "the bias is part of the weights: it is there to choose, and for nothing else",
    "raw": "the k scores are not divided by their sum",
    "over all": "the scores are divided by the sum of all E scores, which is 1, not by that of the k",
    "softmax of scores": "a second softmax is taken, of the scores: divide them by their sum",
    "by k": "the scores are divided by k: divide them by their sum",
    "all tokens": "the scores are divided by the sum over all tokens: each token's k scores add up to 1",
    "largest": "the scores are divided by the largest: divide them by their sum",
    "ones": "every chosen expert counts 1, so that no gradient reaches the router",
    "colder": "the products are divided by the root of D, as in attention: a router does not",
    "over tokens": "the softmax is taken over the tokens: a token's scores add up to 1 over the experts",
    "sigmoid": "scores are sigmoids: a softmax over all experts is wanted",
    "products": "the weights are products, not scores",
    "sum is constant": "no gradient flows through the sum by which the scores are divided",
}


TIES = (
    "experts with equal scores come in any order: of these the smaller number comes first, which "
    "topk and a sort that is not stable do not promise"
)


def equal_scores(given: Arrays, found: Array, choice: Array) -> bool:
    """Tell whether an answer's choice has at each place an expert that is as good as the right
    one.
    """
    x, router, bias = (torch.tensor(given[name]).double() for name in ("x", "router", "bias"))
    told = (x @ router.T).softmax(-1) + bias
    if found.shape != choice.shape or found.min() < 0 or found.max() >= len(router):
        return False
    return torch.equal(told.gather(-1, torch.tensor(found)), told.gather(-1, torch.tensor(choice)))


def judge_route(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Choice, weights, and the gradients that flow back through the weights."""
    given, result = case.given[0], results[0]
    tolerance = HALF if given["half"] else 1e-9
    choice, weights, of_x, of_router = (x.numpy() for x in routed(given))

    def stories(told: Mapping[str, str], number: int) -> dict[str, Callable[[], Array]]:
        return {
            told[name]: partial(lambda name: routed(given, name)[number].numpy(), name)
            for name in told
        }

    told = stories(CHOICE_STORIES, 0)
    if result["choice"].shape == choice.shape and np.array_equal(
        np.sort(result["choice"], 1), np.sort(choice, 1)
    ):
        told |= {
            "the chosen experts are not in the order of their scores, best first": lambda: result[
                "choice"
            ]
        }
    if equal_scores(given, result["choice"], choice):
        last = {story: told.pop(story) for story in [CHOICE_STORIES["last"]]}
        told = last | {TIES: lambda: result["choice"]}
    contract.expect_equal(0, "choice", result["choice"], choice, instead=told)
    told = stories(WEIGHT_STORIES, 1)
    if given["k"] == 1:
        told = {ALWAYS_1: lambda: np.ones_like(weights)} | told
    contract.expect_close(0, "weights", result["weights"], weights, tolerance, instead=told)
    for name, number, expected in (("router", 3, of_router), ("x", 2, of_x)):
        if name == "x" and given["half"]:
            continue
        found = result[f"gradient of {name}"]
        contract.expect_close(
            0,
            f"the gradient of {name}",
            found,
            expected,
            tolerance,
            instead=stories(WEIGHT_STORIES, number),
        )
