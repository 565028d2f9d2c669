"""Lesson 07: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minidist import Communicator
from minidist.grade import contract
from minidist.grade.calls import expect_collectives, forward_backward, spelled
from minidist.grade.contract import Arrays, Case, Judge, Note, Program, Wrong

CUTS = {  # along which dim each parameter is cut
    "mlp": {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": None},
    "attention": {"query": 0, "key": 0, "value": 0, "output": 1},
}
BY_WORDS = {"table": 0, "logits": 1}


def border(name: str) -> Program:
    """Return a program that runs f or g, with a gradient that is not contiguous, and looks whether inputs stayed."""

    def program(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
        x, gradient = torch.tensor(given["x"]), torch.tensor(given["gradient"][:, :1])
        spread = gradient.expand(2, 3)  # one column, seen three times
        found = forward_backward(comm, lambda: getattr(exercise, name)(x, comm), {"x": x}, spread)
        return {**found, "x": x.detach().numpy(), "kept": gradient.numpy()}

    return program


def layer(kind: str) -> Program:
    """Return a program that runs task 2 or 3, and tells how much memory the slices keep alive."""

    def program(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
        whole = {name: torch.tensor(given[name]) for name in CUTS[kind]}
        x, refused = torch.tensor(given["x"]), True
        if kind == "mlp":
            mine = exercise.mlp_slices(whole, comm.rank, comm.size)
        else:
            mine = exercise.attention_slices(whole, int(given["heads"]), comm.rank, comm.size)
            with suppress(ValueError):
                exercise.attention_slices(whole, int(given["heads"]), 0, int(given["heads"]) + 1)
                refused = False
        own = {name: mine[name].detach() for name in CUTS[kind]}
        alive = {slice.untyped_storage().data_ptr(): slice.untyped_storage().nbytes() for slice in own.values()}

        def forward() -> Tensor:
            if kind == "mlp":
                return exercise.parallel_mlp(x, own, comm)
            return exercise.parallel_attention(x, own, int(given["head_dim"]), comm)

        found = forward_backward(comm, forward, {"x": x, **own}, torch.tensor(given["gradient"]))
        found |= {f"the slice of {name}": slice.detach().numpy() for name, slice in own.items()}
        return {**found, "alive": sum(alive.values()), "refused": refused}

    return program


def by_words(array: str) -> Program:
    """Return a program that runs task 4 on this rank's rows of the table, or task 5 on its columns of the logits."""

    def program(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
        vocabulary, tokens = len(given["table"]), torch.tensor(given["tokens"])
        mine = torch.tensor(np.array_split(given[array], comm.size, axis=BY_WORDS[array])[comm.rank])

        def forward() -> Tensor:
            if array == "table":
                return exercise.parallel_embedding(tokens.view(3, 4), mine, vocabulary, comm)
            return exercise.parallel_cross_entropy(mine, tokens, vocabulary, comm)

        return forward_backward(
            comm, forward, {array: mine}, torch.tensor(given["gradient"]) if array == "table" else None
        )

    return program


def judge_border(copies: bool) -> Judge:
    """Compare all of f (`copies`) or g with sums of whole numbers, and see that inputs are as they were."""

    def judge(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
        xs = [given["x"] for given in case.given]
        gradients = [given["gradient"][:, :1] for given in case.given]
        for rank, result in enumerate(results):
            out, gradient = (xs[rank], sum(gradients)) if copies else (sum(xs), gradients[rank])
            contract.expect_equal(rank, "what forward returns", result["out"], out)
            contract.expect_equal(rank, "the gradient of x", result["the gradient of x"], gradient.repeat(3, axis=1))
            contract.expect_equal(rank, "x, after both,", result["x"], xs[rank])
            contract.expect_equal(rank, "the gradient that backward was given", result["kept"], gradients[rank])
        expect_reduced(results, notes, 6, *((0, 1) if copies else (1, 0)))

    return judge


def expect_reduced(results: Sequence[Arrays], notes: Sequence[Note], numbers: int, forward: int, backward: int) -> None:
    """Raise `Wrong` unless just so many all-reduces, of so many numbers each, were called in forward and backward.

    Alone, none of them sends.
    """
    expect_collectives(notes)
    for rank, result in enumerate(results if len(results) > 1 else ()):
        for phase, times in (("forward", forward), ("backward", backward)):
            found, expected = spelled(result[phase]), spelled(np.array([[0, 8 * numbers]] * times))
            if found != expected:
                raise Wrong(f"rank {rank} of {len(results)}: {phase} calls {found}, expected {expected}")


def whole_mlp(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """The MLP on one rank."""
    hidden = F.gelu(F.linear(x, weights["up.weight"], weights["up.bias"]))
    return F.linear(hidden, weights["down.weight"], weights["down.bias"])


def whole_attention(x: Tensor, weights: Mapping[str, Tensor], heads: int) -> Tensor:
    """Attention on one rank: softmax(QKᵀ/√d) V, as it is written."""
    q, k, v = ((x @ weights[name].T).view(2, 3, heads, -1).transpose(1, 2) for name in ("query", "key", "value"))
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights["output"].T


def judge_layer(kind: str) -> Judge:
    """Compare slices, output and gradients with the whole layer's, and what slices keep alive with their size."""

    def judge(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
        given = case.given[0]
        weights = {name: torch.tensor(given[name], requires_grad=True) for name in CUTS[kind]}
        x = torch.tensor(given["x"], requires_grad=True)
        out = whole_mlp(x, weights) if kind == "mlp" else whole_attention(x, weights, int(given["heads"]))
        out.backward(torch.tensor(given["gradient"]))
        for rank, result in enumerate(results):
            needed = 0
            for name, dim in CUTS[kind].items():
                expected, gradient = (
                    array if dim is None else np.array_split(array, case.ranks, axis=dim)[rank]
                    for array in (given[name], weights[name].grad.numpy())
                )
                needed += expected.nbytes
                contract.expect_equal(rank, f"the slice of {name}", result[f"the slice of {name}"], expected)
                contract.expect_close(rank, f"the gradient of {name}", result[f"the gradient of {name}"], gradient)
            contract.expect_close(rank, "what forward returns", result["out"], out.detach().numpy())
            contract.expect_close(rank, "the gradient of x", result["the gradient of x"], x.grad.numpy())
            if int(result["alive"]) > needed:
                raise Wrong(f"rank {rank}: the slices keep {int(result['alive'])} bytes alive, expected {needed}")
            if not result["refused"]:
                raise Wrong(f"rank {rank}: more ranks than heads: attention_slices raised no ValueError")
        expect_reduced(results, notes, out.numel(), 1, 1)

    return judge


def judge_words(array: str) -> Judge:
    """Compare with the whole table or logits; of the loss, three numbers a token are reduced, in forward."""

    def judge(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
        given, tokens = case.given[0], torch.tensor(case.given[0]["tokens"])
        whole = torch.tensor(given[array], requires_grad=True)
        out = F.embedding(tokens.view(3, 4), whole) if array == "table" else F.cross_entropy(whole, tokens)
        torch.autograd.backward(out, torch.tensor(given["gradient"]) if array == "table" else None)
        gradients = np.array_split(whole.grad.numpy(), case.ranks, axis=BY_WORDS[array])
        for rank, result in enumerate(results):
            contract.expect_close(rank, "what forward returns", result["out"], out.detach().numpy())
            found = result[f"the gradient of {array}"]
            contract.expect_close(rank, f"the gradient of its {array}", found, gradients[rank])
            for phase, most in (("forward", 3 * 8 * len(tokens)), ("backward", 0)) if array == "logits" else ():
                if sum(int(row[1]) for row in result[phase]) > most:
                    raise Wrong(f"rank {rank}: {phase} calls {spelled(result[phase])}, expected at most {most} bytes")
        if array == "table":
            expect_reduced(results, notes, out.numel(), 1, 0)
        expect_collectives(notes)

    return judge
