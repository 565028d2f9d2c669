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
from minidist.course.grader import contract
from minidist.course.grader.calls import expect_collectives, forward_backward, spelled
from minidist.course.grader.contract import Array, Arrays, Case, Judge, Note, Program, Wrong

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
        plain = torch.tensor(given["gradient"])  # once more, of one that is contiguous
        getattr(exercise, name)(x.detach().clone().requires_grad_(), comm).backward(plain)
        return {**found, "x": x.detach().numpy(), "kept": gradient.numpy(), "kept plain": plain.numpy()}

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
            total, own = sum(gradients).repeat(3, axis=1), gradients[rank].repeat(3, axis=1)
            of_f = {"backward is the identity, so each rank keeps its own term": own}
            of_g = {"backward sums, as if each rank had a loss of its own": total}
            out, gradient, wrong = (xs[rank], total, of_f) if copies else (sum(xs), own, of_g)
            contract.expect_equal(rank, "what forward returns", result["out"], out)
            contract.expect_equal(rank, "the gradient of x", result["the gradient of x"], gradient, instead=wrong)
            contract.expect_equal(rank, "x, after both,", result["x"], xs[rank], instead={"x is reduced in place": out})
            for name, given in (("kept", gradients[rank]), ("kept plain", case.given[rank]["gradient"])):
                over = {
                    "backward reduces it in place": sum(each["gradient"][:, : given.shape[1]] for each in case.given)
                }
                name, found = "the gradient that backward was given, afterwards,", result[name]
                contract.expect_equal(rank, name, found, given, instead=over)
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


def wrong_slices(case: Case, rank: int, whole: Array, dim: int | None) -> dict[str, Array]:
    """Return what a rank gets if a matrix is cut in another way."""
    if dim is None:
        return {}
    size, ranks, heads = whole.shape[dim], case.ranks, int(case.given[0].get("heads", 0))
    fewest, most = size // ranks, -(-size // ranks)
    takes = {
        "the last rank takes what is left over": np.arange(
            rank * fewest, size if rank == ranks - 1 else (rank + 1) * fewest
        ),
        "all parts but the last are rounded up, as by torch.chunk": np.arange(size)[rank * most : (rank + 1) * most],
        "the channels are dealt out one by one, like cards": np.arange(rank, size, ranks),
    }
    if heads:
        each = np.arange(size).reshape(heads, -1)
        takes["whole heads are dealt out one by one, like cards"] = each[rank::ranks].ravel()
    found = {story: whole.take(places, axis=dim) for story, places in takes.items()}
    return found | {"the other dimension is cut": np.array_split(whole, ranks, axis=whole.ndim - 1 - dim)[rank]}


def wrong_vectors(case: Case) -> dict[str, Array]:
    """Return what comes out of the embedding if a rank takes other words for its own."""
    given, found = case.given[0], {}
    parts, tokens = np.array_split(given["table"], case.ranks), given["tokens"]
    firsts = np.cumsum([0, *map(len, parts)])
    for story in ("first", "last", "zero"):
        total = np.zeros((len(tokens), given["table"].shape[1]))
        for rank, rows in enumerate(parts):
            place = tokens - (rank * len(rows) if story == "first" else firsts[rank])
            here = (place >= 0) & (place < len(rows) - (story == "last"))
            total += np.where(here[:, None] | (story == "zero"), rows[np.where(here, place, 0)], 0)
        found[story] = total.reshape(3, 4, -1)
    return {
        "a rank's first word is its number times the rows that it has": found["first"],
        "the last word of each rank counts as another rank's": found["last"],
        "word 0 of a rank is added for every word that is elsewhere": found["zero"],
    }


def wrong_losses(case: Case) -> dict[str, Array]:
    """Return what the loss is if ranks subtract, or normalize by, something of their own."""
    parts = [torch.tensor(each) for each in np.array_split(case.given[0]["logits"], case.ranks, axis=1)]
    tokens, logits = torch.tensor(case.given[0]["tokens"])[:, None], torch.tensor(case.given[0]["logits"])
    shifted = [each - each.amax(1, keepdim=True) for each in parts]
    own = torch.cat(shifted, 1)
    local = torch.cat([each.log_softmax(1) for each in parts], 1)
    return {
        "each rank subtracts the largest of its own logits": (
            own.exp().sum(1).log() - own.gather(1, tokens)[:, 0]
        ).mean(),
        "each rank's softmax is over its own words": -local.gather(1, tokens).mean(),
        "the losses of the tokens are added up": F.cross_entropy(logits, tokens[:, 0], reduction="sum"),
    }


def judge_layer(kind: str) -> Judge:
    """Compare slices, output and gradients with the whole layer's, and what slices keep alive with their size."""

    def judge(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
        given = case.given[0]
        weights = {name: torch.tensor(given[name], requires_grad=True) for name in CUTS[kind]}
        x = torch.tensor(given["x"], requires_grad=True)
        heads = int(given.get("heads", 0))
        out = whole_mlp(x, weights) if kind == "mlp" else whole_attention(x, weights, heads)
        out.backward(torch.tensor(given["gradient"]))
        for rank, result in enumerate(results):
            needed, own = 0, {}
            for name, dim in CUTS[kind].items():
                expected, gradient = (
                    array if dim is None else np.array_split(array, case.ranks, axis=dim)[rank]
                    for array in (given[name], weights[name].grad.numpy())
                )
                needed, own[name] = needed + expected.nbytes, torch.tensor(expected)
                instead = wrong_slices(case, rank, given[name], dim)
                found = result[f"the slice of {name}"]
                contract.expect_equal(rank, f"the slice of {name}", found, expected, instead=instead)
                contract.expect_close(rank, f"the gradient of {name}", result[f"the gradient of {name}"], gradient)
            alone = torch.tensor(given["x"], requires_grad=True)
            term = whole_mlp(alone, own) if kind == "mlp" else whole_attention(alone, own, heads // case.ranks)
            term.backward(torch.tensor(given["gradient"]))
            instead = {"each rank keeps its own term, so g is missing": term.detach().numpy()}
            if kind == "mlp":
                more = out.detach().numpy() + (case.ranks - 1) * given["down.bias"]
                instead["every rank adds down.bias before the sum"] = more
            contract.expect_close(rank, "what forward returns", result["out"], out.detach().numpy(), instead=instead)
            instead = {"each rank keeps its own term, so f is missing": alone.grad.numpy()}
            found = result["the gradient of x"]
            contract.expect_close(rank, "the gradient of x", found, x.grad.numpy(), instead=instead)
            if int(result["alive"]) > needed:
                found = f"the slices keep {int(result['alive'])} bytes alive, expected {needed}"
                raise Wrong(f"rank {rank}: {found}: a view keeps all of its matrix")
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
        instead = wrong_vectors(case) if array == "table" else wrong_losses(case)
        equal = len({each.shape for each in gradients}) == 1
        summed = (
            {f"f comes before the {array}: it adds up gradients of different words": sum(gradients)} if equal else {}
        )
        for rank, result in enumerate(results):
            contract.expect_close(rank, "what forward returns", result["out"], out.detach().numpy(), instead=instead)
            found = result[f"the gradient of {array}"]
            contract.expect_close(rank, f"the gradient of its {array}", found, gradients[rank], instead=summed)
            for phase, most in (("forward", 3 * 8 * len(tokens)), ("backward", 0)) if array == "logits" else ():
                if sum(int(row[1]) for row in result[phase]) > most:
                    raise Wrong(f"rank {rank}: {phase} calls {spelled(result[phase])}, expected at most {most} bytes")
        if array == "table":
            expect_reduced(results, notes, out.numel(), 1, 0)
        expect_collectives(notes)

    return judge
