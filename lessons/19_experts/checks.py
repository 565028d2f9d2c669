"""Lesson 19: what is checked, and for how many points.

Everything is float64, but for tokens of 16 bits in task 1. The judges compute on one rank, with all
experts. A trace tells what an answer's all-to-alls carried. No two sizes of a case are the same, so
that none can stand for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from judges import clear, judge_route, run_route
from judges_balance import judge_attach, judge_loss, run_attach, run_loss
from judges_dispatch import judge_dispatch, run_dispatch
from judges_room import judge_kept, judge_rebalance, run_kept, run_rebalance
from judges_step import judge_step, run_step

from minidist.course.grader.contract import Case, Check, Draw, Task

PAGE, EXPERT = "minidist.expert", "minidist.full.expert"
BY_HAND = (
    *("minidist.moe", PAGE, "minidist.full.model.moe", EXPERT, "minidist.full.placement"),
    *("minidist.full.mesh", "minidist.full.ddp", "torch.distributed"),
)
ROUTE = Task(1, "route", BY_HAND)
DISPATCH = Task(2, "dispatch", BY_HAND)
BALANCE = Task(3, "balance", BY_HAND)
# Here tokens travel by the book's page.
OTHERS = tuple(name for name in BY_HAND if name != PAGE)
EP = Task(4, "experts on ep ranks", OTHERS, may_use=("comm.split",))

# ---------------------------------------------------------------- cases


def each(make: Callable[..., Case], *sizes: Any) -> Draw:
    """Draw `make(rng, *size)` for each size."""
    return lambda rng: [make(rng, *size) for size in sizes]


def tokens(rng: np.random.Generator, experts: int, k: int, biased: bool = False) -> Case:
    """Draw tokens, a router and a bias; no rounding decides between two experts."""
    router = rng.normal(size=(experts, 5))
    bias = rng.normal(size=experts) / 4 * biased
    x = rng.normal(size=(60, 5))
    x = x[clear(torch.tensor(x), torch.tensor(router), torch.tensor(bias), k).numpy()][:12]
    given = {"x": x, "router": router, "bias": bias, "k": np.array(k), "half": np.array(False)}
    given["gradient"] = rng.normal(size=(len(x), k))
    return Case((given,), f"{k} of {experts} experts" + ", with a bias" * biased)


def ties(rng: np.random.Generator, experts: int, k: int) -> Case:
    """Draw whole numbers, of which products are exact, for pairs of experts that are alike."""
    router = np.repeat(rng.integers(-2, 3, size=(experts, 4)), 2, 0).astype(float)
    x = rng.integers(-2, 3, size=(40, 4)).astype(float)
    given = {
        "x": x,
        "router": router,
        "bias": np.zeros(len(router)),
        "k": np.array(k),
        "half": np.array(False),
    }
    given["gradient"] = rng.normal(size=(len(x), k))
    return Case((given,), f"{k} of {2 * experts} experts, of which each two are alike")


def halves(rng: np.random.Generator, experts: int, k: int) -> Case:
    """Draw tokens of 16 bits, for some of which products of 16 bits would choose other experts."""
    router = torch.tensor(rng.normal(size=(experts, 16))).float()
    x = torch.tensor(rng.normal(size=(400, 16))).bfloat16()
    bias = torch.zeros(experts)
    x = x[clear(x, router, bias, k)]
    rounded = (x @ router.bfloat16().T).float().topk(k + 1).indices[:, :k]
    right = (x.double() @ router.double().T).topk(k).indices
    differ = (rounded != right).any(1)
    x = torch.cat([x[differ][:6], x[~differ][:6]])
    given = {
        "x": x.float().numpy(),
        "router": router.numpy(),
        "bias": bias.numpy(),
        "k": np.array(k),
    }
    given |= {"half": np.array(True), "gradient": rng.normal(size=(len(x), k)).astype(np.float32)}
    return Case((given,), f"{k} of {experts} experts, tokens of 16 bits")


def sends(
    rng: np.random.Generator, counts: Sequence[int], held: int, k: int, few: bool = False
) -> Case:
    """Draw for each rank so many tokens and their choices; if `few`, one expert gets most, and some
    get none.
    """
    ranks, width = len(counts), 3
    experts = held * ranks
    matrices = rng.normal(size=(experts, width, width))
    everyone = []
    for count in counts:
        wish = rng.random((count, experts)) + (4.0 * (np.arange(experts) % 3 == 1) if few else 0.0)
        choice = np.argsort(-wish, 1)[:, :k]
        given = {
            "x": rng.normal(size=(count, width)),
            "choice": choice,
            "weights": rng.random((count, k)),
        }
        everyone.append(given | {"matrices": matrices, "gradient": rng.normal(size=(count, width))})
    what = f"P = {ranks}, {experts} experts, k = {k}, {', '.join(map(str, counts))} tokens"
    return Case(tuple(everyone), what + ", a few experts are chosen" * few)


def sequences(
    rng: np.random.Generator, ranks: int, own: int, experts: int, k: int, factor: float = 1.0
) -> Case:
    """Draw scores and choices of sequences, whose tokens lie on the ranks in any order."""
    time, batch = ranks * own, 2
    scores = rng.random((batch, time, experts)) * (1 + np.arange(experts))
    scores = scores / scores.sum(-1, keepdims=True)
    given = {
        "scores": scores,
        "choice": np.argsort(-scores, -1)[..., :k].copy(),
        "everyones": rng.permutation(time),
    }
    given |= {"experts": np.array(experts), "factor": np.array(factor)}
    what = f"P = {ranks}, {batch} sequences of {time} tokens, {k} of {experts} experts"
    return Case((given,) * ranks, what + f", {factor:g} times the even load" * (factor != 1))


def attached(rng: np.random.Generator, recomputed: bool) -> Case:
    """Draw scores, gradients and counts of three forwards."""
    given = {name: rng.normal(size=(5, 4)) for name in ("logits", "gradient", "auxiliary")}
    given |= {"counts": rng.integers(1, 9, size=(3, 4)), "recomputed": np.array(recomputed)}
    return Case((given,), "with recomputation" if recomputed else "without recomputation")


def tallies(rng: np.random.Generator, ranks: int, experts: int) -> Case:
    """Draw counts of two steps: in the first the last expert has just the mean; in the second the
    first one has less, but as much as is left of the mean without its fraction.
    """
    counts = rng.integers(0, 30, size=(2, ranks, experts))
    total = counts[0].sum(0)
    spare = -int(total[:-1].sum()) % (experts - 1)
    counts[0, 0, 0] += spare
    mean = (int(total[:-1].sum()) + spare) // (experts - 1)
    counts[0, :, -1] = [mean // ranks + (rank < mean % ranks) for rank in range(ranks)]
    others = int(counts[1, :, 1:].sum())
    counts[1, 0, 1] += others % (experts - 1) == 0
    below = others // (experts - 1)
    counts[1, :, 0] = [below // ranks + (rank < below % ranks) for rank in range(ranks)]
    bias = rng.integers(-3, 4, size=experts)
    return Case(
        tuple({"bias": bias, "tallies": counts[:, rank]} for rank in range(ranks)),
        f"P = {ranks}, {experts} experts",
    )


def trained(rng: np.random.Generator, ranks: int, ep: int, held: int, few: bool = False) -> Case:
    """Draw different numbers of tokens for the ranks, a router and experts."""
    experts, width = ep * held, 3
    shared = {
        "router": rng.normal(size=(experts, width)),
        "matrices": rng.normal(size=(experts, width, width)),
    }
    if few:  # of tokens that begin with a large number
        shared["router"][2:] -= 4 * np.eye(width)[0]
    shared["ep"] = np.array(ep)
    everyone = []
    for rank in range(ranks):
        x = rng.normal(size=(2 + (2 * rank) % 5, width))
        # those of the first group go to the first two experts, those of other groups to all others
        if few:
            x[:, 0] = np.where(rank < ep, 4, -4) * (1 + np.abs(x[:, 0]))
        everyone.append(shared | {"x": x, "targets": rng.normal(size=x.shape)})
    what = f"P = {ranks}, ep = {ep}, {experts} experts"
    return Case(tuple(everyone), what + ", some without a token" * few)


# ---------------------------------------------------------------- the checks

ROUTES = (5, 2), (6, 3)
SENDS = ((5, 3), 3, 2), ((2, 4, 3), 2, 3)
BARE = ((0, 4, 0, 3), 2, 2, True), ((3, 2), 1, 1)

CHECKS = [
    Check(ROUTE, "k of E experts", 6, each(tokens, *ROUTES), run_route, judge_route),
    Check(ROUTE, "one expert: the router learns", 5, each(tokens, (5, 1)), run_route, judge_route),
    Check(
        ROUTE,
        "a bias chooses, and does not weigh",
        4,
        each(tokens, (6, 2, True)),
        run_route,
        judge_route,
    ),
    Check(
        ROUTE,
        "equal scores, and tokens of 16 bits",
        3,
        lambda rng: [ties(rng, 4, 3), halves(rng, 16, 4)],
        run_route,
        judge_route,
    ),
    Check(
        DISPATCH,
        "as if one rank had all experts",
        16,
        each(sends, *SENDS),
        run_dispatch,
        judge_dispatch,
    ),
    Check(DISPATCH, "ranks without tokens", 6, each(sends, *BARE), run_dispatch, judge_dispatch),
    Check(
        DISPATCH,
        "the same under mpirun",
        3,
        each(sends, SENDS[0]),
        run_dispatch,
        judge_dispatch,
        wire="mpi",
    ),
    Check(
        BALANCE,
        "an auxiliary loss of each sequence",
        8,
        each(sequences, (2, 4, 5, 2), (3, 2, 4, 1)),
        run_loss,
        judge_loss,
    ),
    Check(
        BALANCE,
        "attached, and counted once",
        8,
        each(attached, (False,), (True,)),
        run_attach,
        judge_attach,
    ),
    Check(
        BALANCE,
        "room in each sequence",
        8,
        each(sequences, (2, 7, 6, 3, 0.45), (3, 5, 5, 2, 1.5)),
        run_kept,
        judge_kept,
    ),
    Check(
        BALANCE,
        "a bias that moves once a step",
        5,
        each(tallies, (2, 5), (3, 4)),
        run_rebalance,
        judge_rebalance,
    ),
    Check(
        BALANCE,
        "room, under mpirun",
        1,
        each(sequences, (2, 7, 6, 3, 0.45)),
        run_kept,
        judge_kept,
        wire="mpi",
    ),
    Check(
        EP,
        "gradients as on one rank",
        12,
        each(trained, (6, 3, 2), (6, 2, 3)),
        run_step,
        judge_step,
    ),
    Check(
        EP,
        "experts to which no token came",
        3,
        each(trained, (4, 2, 2, True)),
        run_step,
        judge_step,
    ),
    Check(
        EP, "the same under mpirun", 2, each(trained, (4, 2, 2)), run_step, judge_step, wire="mpi"
    ),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(
        ROUTE,
        "other sizes",
        2,
        each(tokens, (8, 4, True), (3, 1)),
        run_route,
        judge_route,
        hidden=True,
    ),
    Check(
        DISPATCH,
        "other sizes",
        3,
        each(sends, ((4,), 4, 2), ((1, 0, 5, 2, 3), 1, 2)),
        run_dispatch,
        judge_dispatch,
        hidden=True,
    ),
    Check(
        BALANCE,
        "other losses",
        1,
        each(sequences, (1, 6, 5, 2), (4, 2, 6, 3)),
        run_loss,
        judge_loss,
        hidden=True,
    ),
    Check(
        BALANCE,
        "other room",
        1,
        each(sequences, (4, 3, 5, 2, 0.5)),
        run_kept,
        judge_kept,
        hidden=True,
    ),
    Check(
        BALANCE,
        "other biases",
        1,
        each(tallies, (1, 3), (4, 6)),
        run_rebalance,
        judge_rebalance,
        hidden=True,
    ),
    Check(
        EP, "other sizes", 2, each(trained, (4, 4, 1), (3, 1, 4)), run_step, judge_step, hidden=True
    ),
]
