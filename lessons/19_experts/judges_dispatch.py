"""Lesson 19, task 2: the program that sends tokens to their experts, and its judge."""

from __future__ import annotations

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
from minidist.course.grader.calls import calls, expect_collectives, spelled
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong
from minidist.full.collectives import COLLECTIVES
from minidist.full.trace import Trace

LEAVES = ("x", "weights", "matrices")


def work(rows: Tensor, counts: Sequence[int], matrices: Tensor) -> Tensor:
    """Return what experts make of rows, sorted by expert: tanh(row W), each of its own W."""
    return torch.cat(
        [torch.tanh(part @ w) for part, w in zip(torch.split(rows, counts), matrices, strict=True)]
    )


def run_dispatch(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2, forward and backward."""
    held = len(given["matrices"]) // comm.size
    leaves = {name: torch.tensor(given[name]) for name in ("x", "weights")}
    leaves["matrices"] = torch.tensor(given["matrices"][comm.rank * held : (comm.rank + 1) * held])
    for leaf in leaves.values():
        leaf.requires_grad_()

    def experts(rows: Tensor, counts: Sequence[int]) -> Tensor:
        counts = [int(count) for count in counts]
        if len(counts) != held:
            raise Wrong(
                f"experts are called with {len(counts)} counts: this rank has {held} experts, a "
                "count for each"
            )
        if sum(counts) != len(rows):
            raise Wrong(
                f"experts are called with {len(rows)} rows, and counts that add up to {sum(counts)}"
            )
        return work(rows, counts, leaves["matrices"])

    comm.trace = trace = Trace()
    choice = torch.tensor(given["choice"])
    with contract.untouched(choice=choice):
        out = exercise.dispatch(leaves["x"], choice, leaves["weights"], experts, held, comm)
    forward = calls(trace)
    if not out.requires_grad:
        raise Wrong(
            "what dispatch returns has no gradient: rows have to travel by `exchange`, which has "
            "a backward"
        )
    torch.autograd.backward(out, torch.tensor(given["gradient"]))
    found = {"out": out.detach(), "forward": forward, "backward": calls(trace)[len(forward) :]}
    for name, leaf in leaves.items():
        found[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return {
        name: value.numpy() if isinstance(value, Tensor) else value for name, value in found.items()
    }


# ---------------------------------------------------------------- what should come out


def rows_of(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Return by rank the order that sorts its choices by expert, and how many fall on each."""
    found = []
    for given in case.given:
        flat = torch.tensor(given["choice"]).flatten()
        found.append((flat.argsort(stable=True), flat.bincount(minlength=len(given["matrices"]))))
    return found


def made_by(
    case: Case, leaves: Sequence[dict[str, Tensor]], matrices: Tensor, changed: str
) -> list[Tensor]:
    """Return by rank what experts make of its choices [M, k, D], with a mistake if one is named."""
    ranks, held = case.ranks, len(matrices) // case.ranks
    numbers = torch.arange(len(matrices))
    if changed == "in turn":  # expert e is taken for number e // P of rank e mod P
        numbers = (numbers % ranks) * held + numbers // ranks
    made = []
    for given, mine in zip(case.given, leaves, strict=True):
        choice = torch.tensor(given["choice"])
        rows = mine["x"][:, None].expand(*choice.shape, -1)
        if changed == "other tokens":
            rows = mine["x"].repeat(choice.shape[1], 1).view(rows.shape)
        if changed == "weighted first":
            rows = rows * mine["weights"][..., None]
        made.append(torch.tanh(torch.einsum("mkd,mkdf->mkf", rows, matrices[numbers[choice]])))
        if changed == "only mine":
            made[-1] = made[-1] * (choice // held == len(made) - 1)[..., None]
    if changed not in ("by sender", "by expert"):
        return made
    by_rank = rows_of(case)
    outs = [torch.zeros_like(each).flatten(0, 1) for each in made]
    for owner in range(ranks):
        own = slice(owner * held, (owner + 1) * held)
        places, rows, whose = [], [], []
        for sender, (order, counts) in enumerate(by_rank):
            at = order[counts[: own.start].sum() : counts[: own.stop].sum()]
            places += [(sender, int(place)) for place in at]
            rows.append(leaves[sender]["x"][at // made[sender].shape[1]])
            whose.append(torch.arange(held).repeat_interleave(counts[own]))
        totals = torch.stack([counts[own] for _, counts in by_rank]).sum(0).tolist()
        order = torch.cat(whose).argsort(stable=True) if changed == "by expert" else slice(None)
        found = work(torch.cat(rows)[order], totals, matrices[own])
        for (sender, place), row in zip(places, found, strict=True):
            outs[sender] = outs[sender].index_add(0, torch.tensor([place]), row[None])
    return [out.view(each.shape) for out, each in zip(outs, made, strict=True)]


def serial(case: Case, changed: str = "") -> dict[str, list[Array]]:
    """Return by rank what is returned and the gradients, as if one rank had all experts."""
    matrices = torch.tensor(case.given[0]["matrices"], requires_grad=True)
    leaves = [
        {name: torch.tensor(given[name], requires_grad=True) for name in LEAVES[:2]}
        for given in case.given
    ]
    outs = []
    for (order, _), mine, made in zip(
        rows_of(case), leaves, made_by(case, leaves, matrices, changed), strict=True
    ):
        weights, flat = mine["weights"], made.flatten(0, 1)
        if changed == "not undone":
            made = flat[order].view(made.shape)
        if changed == "undone twice":
            made = flat[order][order].view(made.shape)
        if changed == "sorted weights":
            weights = weights.flatten()[order].view(weights.shape)
        if changed == "too early":
            weights = weights.flatten()[order.argsort()].view(weights.shape)
        if changed == "unweighted":
            weights = torch.ones_like(weights)
        if changed == "mean":
            weights = torch.full_like(weights, 1 / weights.shape[1])
        if changed == "shares":
            weights = weights / weights.sum(1, keepdim=True)
        if changed == "weighted first":
            weights = torch.ones_like(weights)
        if changed == "best":
            weights = weights * torch.eye(weights.shape[1])[0]
        outs.append((made * weights[..., None]).sum(1) + mine["x"] * (changed == "residual"))
    total = sum(
        (out * torch.tensor(given["gradient"])).sum()
        for out, given in zip(outs, case.given, strict=True)
    )
    assert isinstance(total, Tensor)
    total.backward()
    held = len(matrices) // case.ranks

    def gradient(leaf: Tensor) -> Array:
        found: Array = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).numpy()
        return found

    every = gradient(matrices)
    return {
        "out": [out.detach().numpy() for out in outs],
        **{name: [gradient(mine[name]) for mine in leaves] for name in LEAVES[:2]},
        "matrices": [every[rank * held : (rank + 1) * held] for rank in range(case.ranks)],
    }


STORIES = {
    "not undone": "what comes back is taken in the order in which it was sent, by expert: undo the sort, so "
    "that each token gets its own",
    "undone twice": "the sort is undone with the wrong permutation: back[order] sorts once more, and its inverse "
    "is wanted",
    "by sender": "rows are handed to the experts in the order in which they came, by sender: sort them by "
    "expert, or call the experts for each sender",
    "by expert": "what the experts made goes back in the order of the experts: each sender is to get its own "
    "rows, in the order in which they came",
    "residual": "x is added to the sum: that is left to the model",
    "other tokens": "rows are those of other tokens: choice i is one of token i // k, not i mod M",
    "weighted first": "rows are weighted before the experts see them: weigh what they made",
    "shares": "the weights are divided by their sum: they are taken as they are",
    "unweighted": "what the k experts made is added up without the weights",
    "mean": "what the k experts made is averaged: each counts by its weight",
    "sorted weights": "the weights are in the order of the rows that were sent, by expert, and the rows no longer "
    "are",
    "too early": "weights by token are multiplied with rows by expert: sort the rows back first",
    "in turn": "expert e is taken for one of rank e mod P: rank r has neighbouring experts, from r E/P on",
    "only mine": "choices that fall on experts of other ranks are lost",
    "best": "only the first of the k choices counts",
}
NAMES = {
    "out": "what is returned",
    "x": "the gradient of x",
    "weights": "the gradient of the weights",
    "matrices": "the gradient of this rank's experts",
}


def judge_dispatch(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As if one rank had all experts; three all-to-alls forward, two backward, and no row too
    many.
    """
    expected = serial(case)
    for key, name in NAMES.items():

        def of(changed: str, key: str = key) -> list[Array]:
            return serial(case, changed)[key]

        stories: dict[str, Callable[[], Sequence[Array]]] = {
            story: partial(of, changed) for changed, story in STORIES.items()
        }
        nothing = {
            "matrices": "into the experts",
            "x": "to x through the exchanges: they have to have a backward",
        }
        nothing["weights"] = (
            "to the weights: they are multiplied with what the experts made, and not detached"
        )
        if key in nothing:
            zeros = [np.zeros_like(each) for each in expected[key]]
            stories = {f"no gradient flows back {nothing[key]}": partial(list, zeros)} | stories
        expect_everywhere(name, [result[key] for result in results], expected[key], stories)
    for rank in range(case.ranks if case.ranks > 1 else 0):
        expect_calls(case, rank, results[rank])
    for note in notes:
        if note.kind == "all_gather_object":
            raise Wrong(
                f"{note.line} leaves out how many rows are coming, so the exchange asks the other "
                "ranks behind the messages: send the counts, and tell it"
            )
    expect_collectives(notes)


def expect_calls(case: Case, rank: int, result: Arrays) -> None:
    """Raise `Wrong` unless the all-to-alls carried the counts and the rows, and nothing else."""
    given = case.given[rank]
    experts, width = len(given["matrices"]), given["x"].shape[1] * 8
    held = experts // case.ranks
    leaving = given["choice"].size * width
    coming = sum(int((each["choice"] // held == rank).sum()) for each in case.given) * width
    wanted = {"forward": [8 * experts, leaving, coming], "backward": [leaving, coming]}
    for phase, sizes in wanted.items():
        rows = result[phase].reshape(-1, 2).astype(int)
        names = {COLLECTIVES[row[0]] for row in rows}
        if names == {"all_to_all"} and rows[:, 1].tolist() == sizes:
            continue
        exchanged = [int(bytes) for number, bytes in rows if COLLECTIVES[number] == "all_to_all"]
        hint = ""
        if len(exchanged) == len(sizes) and sum(exchanged) > sum(sizes):
            hint = ": more is sent than was chosen, as if rows were padded to one number for all"
        elif phase == "forward" and exchanged == sizes[1:] and len(rows) == 3:
            hint = ": a rank needs the counts of its own experts, not those of all"
        elif phase == "forward" and exchanged[1:] == sizes[1:]:
            hint = ": the counts are int64, one for each of all E experts"
        elif names & {"all_gather", "all_reduce"}:
            hint = (
                ": every rank gets everybody's tokens, and needs only those that chose its experts"
            )
        elif phase == "forward" and len(exchanged) == 2:
            hint = ": tell the ranks first how many rows are coming to each of their experts"
        shown = ", ".join(map(str, sizes))
        raise Wrong(
            f"rank {rank}: {phase} calls {spelled(rows)}, expected all_to_alls of {shown} "
            f"bytes{hint}"
        )
