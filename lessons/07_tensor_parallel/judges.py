"""Lesson 07: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Return a program that runs f or g, with a gradient that is not contiguous, and looks whether
    inputs stayed.
    """

    def program(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
        x, gradient = torch.tensor(given["x"]), torch.tensor(given["gradient"][:, :1])
        spread = gradient.expand(2, 3)  # one column, seen three times
        found = forward_backward(comm, lambda: getattr(exercise, name)(x, comm), {"x": x}, spread)
        # once more, of one that is contiguous, and of columns
        plain = torch.tensor(given["gradient"])
        refused = False
        for each in (plain, plain.T.contiguous().T):
            try:
                getattr(exercise, name)(
                    torch.empty_like(each).copy_(x.detach()).requires_grad_(), comm
                ).backward(each)
            except ValueError as error:
                if "contiguous" not in str(error):
                    raise
                refused = True
        return {
            **found,
            "x": x.detach().numpy(),
            "kept": gradient.numpy(),
            "kept plain": plain.numpy(),
            "refused": refused,
        }

    return program


def layer(kind: str) -> Program:
    """Return a program that runs task 2 or 3, and tells how much memory the slices keep alive."""

    def program(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
        whole = {name: torch.tensor(given[name]) for name in CUTS[kind]}
        # by how many ranks heads were shared out that do not divide
        x, refused = torch.tensor(given["x"]), 0
        with contract.untouched(**whole):
            if kind == "mlp":
                mine = exercise.mlp_slices(whole, comm.rank, comm.size)
            else:
                mine = exercise.attention_slices(whole, int(given["heads"]), comm.rank, comm.size)
        if kind == "attention":
            heads = int(given["heads"])
            for ranks in (many for many in range(2, heads + 2) if heads % many):
                with suppress(ValueError):
                    exercise.attention_slices(whole, heads, 0, ranks)
                    refused = min(refused or ranks, ranks)
        own = {name: mine[name].detach() for name in CUTS[kind]}
        alive = {
            slice.untyped_storage().data_ptr(): slice.untyped_storage().nbytes()
            for slice in own.values()
        }

        def forward() -> Tensor:
            if kind == "mlp":
                return exercise.parallel_mlp(x, own, comm)
            return exercise.parallel_attention(x, own, int(given["head_dim"]), comm)

        found = forward_backward(comm, forward, {"x": x, **own}, torch.tensor(given["gradient"]))
        found |= {f"the slice of {name}": slice.detach().numpy() for name, slice in own.items()}
        return {**found, "alive": sum(alive.values()), "refused": refused}

    return program


def by_words(array: str) -> Program:
    """Return a program that runs task 4 on this rank's rows of the table, or task 5 on its columns
    of the logits.
    """

    def program(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
        vocabulary, tokens = len(given["table"]), torch.tensor(given["tokens"])
        mine = torch.tensor(
            np.array_split(given[array], comm.size, axis=BY_WORDS[array])[comm.rank]
        )

        def forward() -> Tensor:
            name = "tokens" if array == "table" else "targets"
            with contract.untouched(**{name: tokens, array: mine}):
                if array == "table":
                    return exercise.parallel_embedding(tokens.view(3, 4), mine, vocabulary, comm)
                return exercise.parallel_cross_entropy(mine, tokens, vocabulary, comm)

        return forward_backward(
            comm,
            forward,
            {array: mine},
            torch.tensor(given["gradient"]) if array == "table" else None,
        )

    return program


def judge_border(copies: bool) -> Judge:
    """Compare all of f (`copies`) or g with sums of whole numbers, and see that inputs are as they
    were.
    """

    def judge(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
        xs = [given["x"] for given in case.given]
        gradients = [given["gradient"][:, :1] for given in case.given]
        for rank, result in enumerate(results):
            contract.expect_dtype(rank, "what forward returns", result["out"], xs[rank])
            total, own = sum(gradients).repeat(3, axis=1), gradients[rank].repeat(3, axis=1)
            of_f = {"backward is the identity, so each rank keeps its own term": own}
            of_g = {"backward sums, as if each rank had a loss of its own": total}
            out, gradient, wrong = (xs[rank], total, of_f) if copies else (sum(xs), own, of_g)
            ranks, mean = (
                case.ranks,
                "forward takes the mean over the ranks"
                if not copies
                else "forward sums, as g does",
            )
            of_out = {mean: sum(xs) if copies else sum(xs) / ranks}
            if not copies:
                of_out["forward is the identity, as of f"] = xs[rank]
            wrong |= {
                "backward takes the mean over the ranks": total / ranks,
                "backward divides by P": own / ranks,
            }
            wrong |= {
                "backward multiplies by P": own * ranks,
                "the rank's own gradient is added once more": total + own,
            }
            contract.expect_equal(rank, "what forward returns", result["out"], out, instead=of_out)
            contract.expect_equal(
                rank, "the gradient of x", result["the gradient of x"], gradient, instead=wrong
            )
            contract.expect_equal(
                rank,
                "x, after both,",
                result["x"],
                xs[rank],
                instead={"x is reduced in place": out},
            )
            for name, given in (
                ("kept", gradients[rank]),
                ("kept plain", case.given[rank]["gradient"]),
            ):
                over = {
                    "backward reduces it in place": sum(
                        each["gradient"][:, : given.shape[1]] for each in case.given
                    )
                }
                name, found = "the gradient that backward was given, afterwards,", result[name]
                contract.expect_equal(rank, name, found, given, instead=over)
        for rank, result in enumerate(results):
            if result["refused"]:
                why = (
                    "clone() alone keeps the order in memory, so say "
                    "memory_format=torch.contiguous_format"
                )
                raise Wrong(
                    f"rank {rank}: all_reduce refuses a tensor that is not contiguous, of "
                    f"columns: {why}"
                )
        expect_reduced(results, notes, 6, *((0, 1) if copies else (1, 0)))

    return judge


def expect_reduced(
    results: Sequence[Arrays], notes: Sequence[Note], numbers: int, forward: int, backward: int
) -> None:
    """Raise `Wrong` unless just so many all-reduces, of so many numbers each, were called in
    forward and backward.

    Alone, none of them sends.
    """
    expect_collectives(notes)
    for rank, result in enumerate(results if len(results) > 1 else ()):
        for phase, times in (("forward", forward), ("backward", backward)):
            found, expected = spelled(result[phase]), spelled(np.array([[0, 8 * numbers]] * times))
            if found != expected:
                raise Wrong(
                    f"rank {rank} of {len(results)}: {phase} calls {found}, expected {expected}"
                )


def wrong_vectors(case: Case) -> dict[str, Array]:
    """Return what comes out of the embedding if a rank takes other words for its own."""
    given, found = case.given[0], {}
    parts, tokens = np.array_split(given["table"], case.ranks), given["tokens"]
    firsts = np.cumsum([0, *map(len, parts)])
    for story in ("first", "last", "zero"):  # by what is mistaken
        total = np.zeros((len(tokens), given["table"].shape[1]))
        for rank, rows in enumerate(parts):
            place = tokens - (rank * len(rows) if story == "first" else firsts[rank])
            here = (place >= 0) & (place < len(rows) - (story == "last"))
            total += np.where(here[:, None] | (story == "zero"), rows[np.where(here, place, 0)], 0)
        found[story] = total.reshape(3, 4, -1)
    cards, nearest = np.zeros_like(total), np.zeros_like(total)
    for rank, rows in enumerate(parts):
        place = np.minimum(tokens // case.ranks, len(rows) - 1)
        cards += np.where((tokens % case.ranks == rank)[:, None], rows[place], 0)
        nearest += rows[np.clip(tokens - firsts[rank], 0, len(rows) - 1)]
    right = given["table"][tokens].reshape(3, 4, -1)
    return {
        "words are dealt out one by one, like cards": cards.reshape(right.shape),
        "a word that is elsewhere is not masked: the nearest one that is here is added": nearest.reshape(
            right.shape
        ),
        "the mean over the ranks is taken": right / case.ranks,
        "a rank's first word is its number times the rows that it has": found["first"],
        "the last word of each rank counts as another rank's": found["last"],
        "word 0 of a rank is added for every word that is elsewhere": found["zero"],
    }


def wrong_losses(case: Case) -> dict[str, Array]:
    """Return what the loss is if ranks subtract, or normalize by, something of their own."""
    parts = [
        torch.tensor(each) for each in np.array_split(case.given[0]["logits"], case.ranks, axis=1)
    ]
    tokens, logits = (
        torch.tensor(case.given[0]["tokens"])[:, None],
        torch.tensor(case.given[0]["logits"]),
    )
    shifted = [each - each.amax(1, keepdim=True) for each in parts]
    own = torch.cat(shifted, 1)
    local = torch.cat([each.log_softmax(1) for each in parts], 1)
    largest = logits.amax(1)
    sums, target = (
        (logits - largest[:, None]).exp().sum(1).log(),
        logits.gather(1, tokens)[:, 0] - largest,
    )
    words, many = logits.shape[1], len(tokens)
    by_rank = [(each - largest[:, None]).exp().sum(1).log() for each in parts]
    firsts, unmasked = (
        np.cumsum([0, *(each.shape[1] for each in parts)]),
        torch.zeros(many, dtype=torch.float64),
    )
    for first, each in zip(firsts, parts, strict=False):
        place = tokens[:, 0] - int(first)
        here = (place >= 0) & (place < each.shape[1])
        unmasked += each.gather(1, torch.where(here, place, 0)[:, None])[:, 0] - largest
    loss = (sums - target).mean()
    return {
        "each rank subtracts the largest of its own logits": (
            own.exp().sum(1).log() - own.gather(1, tokens)[:, 0]
        ).mean(),
        "each rank's softmax is over its own words": -local.gather(1, tokens).mean(),
        "the losses of the tokens are added up": F.cross_entropy(
            logits, tokens[:, 0], reduction="sum"
        ),
        "the logit of the target is left out": sums.mean(),
        "the largest logit is subtracted in the sum, and not from the target's": (
            sums - target - largest
        ).mean(),
        "the largest logit is subtracted from the target's, and not in the sum": (
            sums + largest - target
        ).mean(),
        "the logarithm is to the base 2": loss / np.log(2),
        "the sign is turned: the loss is log of the sum minus the target": -loss,
        "it is divided by the words, and not by the tokens": loss * many / words,
        "it is divided by the number of ranks": loss / case.ranks,
        "it is multiplied by the number of ranks": loss * case.ranks,
        "word 0 of a rank is added for every target that is elsewhere": (sums - unmasked).mean(),
        "logarithms are summed over the ranks, not the sums of exponentials": (
            sum(by_rank) - target
        ).mean(),
        "the logarithm is left out": (sums.exp() - target).mean(),
    }


def judge_words(array: str) -> Judge:
    """Compare with the whole table or logits; of the loss, three numbers a token are reduced, in
    forward.
    """

    def judge(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
        given, tokens = case.given[0], torch.tensor(case.given[0]["tokens"])
        whole = torch.tensor(given[array], requires_grad=True)
        out = (
            F.embedding(tokens.view(3, 4), whole)
            if array == "table"
            else F.cross_entropy(whole, tokens)
        )
        torch.autograd.backward(out, torch.tensor(given["gradient"]) if array == "table" else None)
        gradients = np.array_split(whole.grad.numpy(), case.ranks, axis=BY_WORDS[array])
        instead = wrong_vectors(case) if array == "table" else wrong_losses(case)
        equal = len({each.shape for each in gradients}) == 1
        summed = (
            {f"f comes before the {array}: it adds up gradients of different words": sum(gradients)}
            if equal
            else {}
        )
        for rank, result in enumerate(results):
            if array == "table":
                words = np.arange(len(given["table"]))
                here = np.isin(given["tokens"], np.array_split(words, case.ranks)[rank])[:, None]
                mine = np.where(here, given["table"][given["tokens"]], 0).reshape(3, 4, -1)
                instead["each rank keeps its own words' vectors, so g is missing"] = mine
            contract.expect_close(
                rank, "what forward returns", result["out"], out.detach().numpy(), instead=instead
            )
            found = result[f"the gradient of {array}"]
            summed["backward sums the gradient, which every rank has whole"] = (
                gradients[rank] * case.ranks
            )
            summed["backward divides by the number of ranks"] = gradients[rank] / case.ranks
            contract.expect_close(
                rank, f"the gradient of its {array}", found, gradients[rank], instead=summed
            )
            for phase, most in (
                (("forward", 3 * 8 * len(tokens)), ("backward", 0)) if array == "logits" else ()
            ):
                if sum(int(row[1]) for row in result[phase]) > most:
                    raise Wrong(
                        f"rank {rank}: {phase} calls {spelled(result[phase])}, expected at most "
                        f"{most} bytes"
                    )
        if array == "table":
            expect_reduced(results, notes, out.numel(), 1, 0)
        expect_collectives(notes)

    return judge
