"""Lesson 19, task 4: the program that trains experts on ep ranks in edp copies, and its judge."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from judges import expect_everywhere
from judges_dispatch import work
from torch import Tensor

from minidist import Communicator
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong
from minidist.expert import dispatch

ROUNDED = 1e-6  # of a divisor: whole numbers divided by each other are float32


def losses(x: Tensor, router: Tensor, matrices: Tensor, targets: Tensor, outputs: Any) -> Tensor:
    """Return the sum of the tokens' losses; each goes to its best two experts, by `outputs(rows,
    order, counts)`.
    """
    scores = (x @ router.T).softmax(-1)
    weights, choice = scores.topk(2)
    flat = choice.flatten()
    order = flat.argsort(stable=True)
    made = outputs(x[order // 2], flat.bincount(minlength=len(router)).tolist())
    back = torch.zeros_like(made).index_copy(0, order, made).view(len(x), 2, -1)
    return ((back * weights[..., None]).sum(1) - targets).square().sum()


def run_step(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run forward and backward of this rank's tokens with the package's dispatch, and have
    gradients synchronized.
    """
    ep = int(given["ep"])
    share, copies = exercise.groups(comm, ep)
    found = {"share": list(share.members), "copies": list(copies.members)}
    expect_groups(comm, ep, found)
    held = len(given["matrices"]) // ep
    first = share.rank * held
    mine = torch.tensor(given["matrices"][first : first + held]).tensor_split(min(2, held))
    # several parameters, as several experts have
    parts = [matrix.clone().requires_grad_() for matrix in mine]
    matrices = torch.cat(parts)
    router = torch.tensor(given["router"], requires_grad=True)
    came = [0]

    def compute(number: int, rows: Tensor) -> Tensor:
        came[0] += len(rows)
        return work(rows, [len(rows)], matrices[number : number + 1])

    experts = [partial(compute, number) for number in range(held)]

    def send(rows: Tensor, counts: Sequence[int]) -> Tensor:
        return dispatch(rows, torch.tensor(counts), experts, share)

    losses(
        torch.tensor(given["x"]), router, matrices, torch.tensor(given["targets"]), send
    ).backward()
    for part in parts if not came[0] else []:
        part.grad = None
    exercise.synchronize(router, parts, len(given["x"]), copies, comm)
    for name, parameters in (("router", [router]), ("experts", parts)):
        found[f"{name} left"] = any(each.grad is None for each in parameters)
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        found[name] = torch.cat(grads).numpy()
    return found


def expect_groups(comm: Communicator, ep: int, found: dict[str, Any]) -> None:
    """Raise `Wrong` unless a rank is in the right groups: the rest cannot run in others."""
    start = comm.rank // ep * ep
    right = {
        "share": list(range(start, start + ep)),
        "copies": list(range(comm.rank % ep, comm.size, ep)),
    }
    names = {"share": "shares the experts with", "copies": "has the same experts as"}
    for key, ranks in right.items():
        if found[key] != ranks:
            hint = ""
            if sorted(found[key]) == list(
                range(comm.rank % (comm.size // ep), comm.size, comm.size // ep)
            ):
                hint = (
                    ": neighbours share the experts, for tokens travel in every layer; copies are "
                    "far apart"
                )
            edp = comm.size // ep
            if found[key] == list(range(comm.rank // edp * edp, comm.rank // edp * edp + edp)):
                hint = (
                    f": as many neighbours as there are copies, P/ep = {edp}, where ep = {ep} "
                    "share the experts"
                )
            if found[key] == right["copies" if key == "share" else "share"]:
                both = found["share"] == found["copies"]
                hint = (
                    ": both groups are the same one" if both else ": the two groups are exchanged"
                )
            raise Wrong(
                f"of {comm.size} ranks this one {names[key]} ranks {found[key]}, expected "
                f"{ranks}{hint}"
            )


# ---------------------------------------------------------------- what should come out


def terms(case: Case) -> list[tuple[Array, Array]]:
    """Return by rank the gradients, of router and all experts, of the losses of that rank's tokens
    alone.
    """
    found = []
    for given in case.given:
        router, matrices = (
            torch.tensor(case.given[0][name], requires_grad=True) for name in ("router", "matrices")
        )
        alone = partial(work, matrices=matrices)
        losses(
            torch.tensor(given["x"]), router, matrices, torch.tensor(given["targets"]), alone
        ).backward()
        found.append((router.grad.numpy(), matrices.grad.numpy()))
    return found


def of_groups(case: Case) -> list[Array]:
    """Return by rank what backward leaves in its experts: the terms of the tokens of its group."""
    ep = int(case.given[0]["ep"])
    held = len(case.given[0]["matrices"]) // ep
    by_rank = [matrices for _, matrices in terms(case)]
    found = []
    for rank in range(case.ranks):
        group = range(rank // ep * ep, rank // ep * ep + ep)
        found.append(sum(by_rank[each] for each in group)[rank % ep * held :][:held])  # type: ignore[index]
    return found


def synchronized(case: Case, name: str, changed: str = "") -> list[Array]:
    """Return by rank the gradient that it should have, of `router` or `experts`, with a mistake if
    one is named.
    """
    ep, ranks = int(case.given[0]["ep"]), case.ranks
    tokens = [len(given["x"]) for given in case.given]
    edp = ranks // ep
    groups = [
        list(range(ranks)) if name == "router" else list(range(rank % ep, ranks, ep))
        for rank in range(ranks)
    ]
    if changed == "all":
        groups = [list(range(ranks))] * ranks
    if changed in ("not summed", "untouched"):
        groups = [[rank] for rank in range(ranks)]
    if changed == "share":
        groups = [list(range(rank // ep * ep, rank // ep * ep + ep)) for rank in range(ranks)]
    if changed == "copies":
        groups = [list(range(rank % ep, ranks, ep)) for rank in range(ranks)]
    own = [router for router, _ in terms(case)] if name == "router" else of_groups(case)
    found: list[Array] = []
    for rank, group in enumerate(groups):
        copies = sum(tokens[each] for each in range(rank % ep, ranks, ep))
        by = {"own tokens": tokens[rank], "copies' tokens": copies, "sum": 1, "untouched": 1}.get(
            changed, sum(tokens)
        )
        by = ranks if changed == "ranks" else by
        by *= {"by ep": ep, "by edp": edp, "by P": ranks, "times ep": 1 / ep}.get(changed, 1)
        found.append(np.asarray(sum(own[each] for each in group)) / by)
    if changed == "own tokens before":
        found = [np.asarray(sum(own[each] / tokens[each] for each in group)) for group in groups]
    if changed == "first alone":
        half = -(-len(own[0]) // 2)
        found = [
            np.concatenate([each[:half], mine[half:]])
            for each, mine in zip(found, own, strict=True)
        ]
    if changed == "each its own mean":
        found = [
            np.asarray(sum(own[each] / tokens[each] for each in group)) / len(group)
            for group in groups
        ]
    return found


STORIES = {
    "by ep": "the experts' gradients are divided by ep: a rank's experts have the terms of the tokens of "
    "ep ranks, and all of these count",
    "times ep": "the experts' gradients are averaged as if each rank had its own tokens only: they are ep "
    "times too large",
    "by edp": "the sum is divided by the number of copies, too: it is a sum of different tokens' terms",
    "by P": "the sum is divided by the number of ranks, too: all tokens are in the divisor already",
    "not summed": "nothing is added up: other groups' tokens came to the copies of these parameters",
    "untouched": "gradients stay as backward left them",
    "all": "experts' gradients are added up over all ranks: other ranks have other experts",
    "share": "gradients are added up over the ranks that share the experts: these have other experts",
    "copies": "the router's gradient is added up over the copies of this rank's experts: all ranks have the "
    "router",
    "own tokens before": "each rank divides by its own number of tokens before the sum: divide by those of all "
    "ranks",
    "ranks": "the sum is divided by the number of ranks, not by the tokens of all of them",
    "first alone": "only the first of the experts' parameters is added up and divided; there are several",
    "own tokens": "each rank divides by its own number of tokens: the mean is over the tokens of all ranks",
    "copies' tokens": "the divisor is the number of tokens of the ranks that have the same experts, which lacks "
    "those of the ranks that share them: about ep times too large",
    "each its own mean": "the ranks' means are averaged: ranks have different numbers of tokens",
    "sum": "nothing is divided by the number of tokens",
}
# what a story cannot be about
ABOUT = {"router": {"by ep", "times ep", "all", "first alone"}, "experts": {"copies"}}


def judge_step(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As on one rank."""
    for name in ("router", "experts"):
        for rank, expected in enumerate(synchronized(case, name)):
            if results[rank][f"{name} left"] and expected.any():
                raise Wrong(
                    f"rank {rank}: when synchronize returns, `.grad` of its {name} is None: it "
                    "counts as zeros in the sum, and is to hold the sum afterwards, which other "
                    "ranks' tokens have a part in"
                )
        expect_everywhere(
            f"the gradient of the {name}",
            [result[name] for result in results],
            synchronized(case, name),
            {
                story: partial(synchronized, case, name, changed)
                for changed, story in STORIES.items()
                if changed not in ABOUT[name]
            },
            ROUNDED,
        )
