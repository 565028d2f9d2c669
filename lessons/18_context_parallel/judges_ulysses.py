"""Lesson 18, task 4: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from judges import HEADS, attention, expect_everywhere, leaves_of

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.calls import expect_collectives, forward_backward, spelled
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong
from minidist.full.collectives import COLLECTIVES


def run_refusal(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 with heads that cannot be shared out."""
    refused, before = [], comm.traffic.messages
    lies = torch.arange(comm.size)
    for heads, groups in unshared(comm.size):
        query, key = (torch.ones(1, count, 1, 2, dtype=torch.float64) for count in (heads, groups))
        try:
            exercise.ulysses_attention(query, key, key, lies, comm)
        except ValueError:
            refused.append(heads)
    return {"refused": np.array(refused, int), "sent": comm.traffic.messages - before}


def unshared(ranks: int) -> tuple[tuple[int, int], ...]:
    """Return heads of queries, and of keys, that cannot be shared out among ranks."""
    return (ranks + 1, 1), (6 * ranks * (ranks + 1), ranks + 1)


def judge_refusal(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """A ValueError on every rank, and nothing is sent before."""
    for rank, result in enumerate(results):
        if int(result["sent"]):
            raise Wrong(
                f"rank {rank} sends messages before it refuses heads that cannot be shared "
                "out: look at them first"
            )
        for heads, groups in unshared(case.ranks):
            if heads not in result["refused"]:
                says = f"{heads} heads, {groups} of keys, on {case.ranks} ranks"
                why = (
                    f"{case.ranks} does not divide {heads}"
                    if heads % case.ranks
                    else "neither divides the other"
                )
                raise Wrong(
                    f"rank {rank}: ulysses_attention raises no ValueError for {says}: {why}"
                )


def run_ulysses(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4."""
    mine = given["everyones"].reshape(comm.size, -1)[comm.rank]
    qkv = {name: torch.tensor(given[name][:, :, mine]) for name in HEADS}
    try:
        return forward_backward(
            comm,
            lambda: exercise.ulysses_attention(
                *qkv.values(), torch.tensor(given["everyones"]), comm
            ),
            qkv,
            torch.tensor(given["gradient"][:, :, mine]),
        )
    except RuntimeError as error:
        if "does not have a grad_fn" not in str(error):
            raise
        why = (
            "all_to_all alone has no backward, so write a torch.autograd.Function with one, and "
            "detach nothing"
        )
        raise Wrong(f"what ulysses_attention returns has no gradient: {why}") from error


def keys_met(heads: int, groups: int, ranks: int, changed: str) -> list[int]:
    """Return which head of keys each head of queries meets by a mistake."""
    copies = max(1, ranks // groups)
    every = groups * copies  # heads of keys, with copies
    if changed == "repeat":
        return [head // (heads // every) % groups for head in range(heads)]
    # rank, and place there, if dealt like cards
    place = [(head % ranks, head // ranks) for head in range(heads)]
    return [(rank + ranks * (at // (heads // every))) // copies for rank, at in place]


def ulysses_found(given: Arrays, changed: str = "") -> list[Array]:
    """Return output and gradients [B, heads, T, d] in the order of positions, with a mistake if one
    is named.
    """
    leaves = leaves_of(given)
    query, key, value = leaves
    time, ranks = query.shape[2], given["ranks"]
    place = torch.arange(time)
    seen = place <= place[:, None]
    lies = torch.tensor(given["everyones"])
    arrives = lies.argsort()  # by position, when each token comes
    if changed == "arrival":
        seen = arrives <= arrives[:, None]
    if changed == "own":
        whose = arrives // (time // int(ranks))
        seen = seen & (whose == whose[:, None])
    if changed == "none":
        seen = torch.ones_like(seen)
    if changed in ("repeat", "cards"):
        met = keys_met(query.shape[1], key.shape[1], int(ranks), changed)
        key, value = (x[:, met] for x in (key, value))
    if changed in ("value unsorted", "unsorted"):
        value = value[:, :, lies]
    if changed == "unsorted":
        query, key = query[:, :, lies], key[:, :, lies]
    output, _ = attention(query, key, value, seen)
    if changed == "sorted twice":
        output = output[:, :, arrives[arrives]]
    output.backward(torch.tensor(given["gradient"]))
    return [output.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)]


ULYSSES_STORIES = {
    "own": "each rank attends to its own tokens only",
    "arrival": "tokens are taken in the order in which they arrive: the mask wants them in the order of "
    "positions",
    "none": "no key is hidden",
    "value unsorted": "values are not put in the order of positions, and queries and keys are",
    "unsorted": "tokens are not put in the order of positions before attention, and their order is undone "
    "behind it",
    "sorted twice": "the order is undone with the wrong permutation: what sorted once sorts once more",
    "repeat": "heads of keys are repeated in turn (0 1 0 1): copies of a head are to be neighbours (0 0 "
    "1 1)",
    "cards": "heads are dealt like cards (rank r has r, r + P, ...): the first rank is to have the "
    "first heads",
}


def ulysses_stories(given: Arrays) -> dict[str, str]:
    """Return the mistakes and their stories; two that come out alike are told together."""
    sizes = given["query"].shape[1], given["key"].shape[1], int(given["ranks"])
    repeat, cards = (keys_met(*sizes, changed) for changed in ("repeat", "cards"))
    stories = dict(ULYSSES_STORIES)
    if repeat == cards:
        stories["repeat"] += ", or if " + stories.pop("cards")
    return stories


def judge_ulysses(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As attention on one rank; so many bytes in all-to-alls, and as many back."""
    given = case.given[0]
    places = given["everyones"].reshape(case.ranks, -1)
    expected = ulysses_found(given)
    stories = ulysses_stories(given)
    for number, name in enumerate(("out", *(f"the gradient of {name}" for name in HEADS))):

        def of(changed: str, rank: int, number: int = number) -> Array:
            return ulysses_found(given, changed)[number][:, :, places[rank]]

        instead: dict[str, Callable[[int], Array]] = {
            story: partial(of, changed) for changed, story in stories.items()
        }
        right = [expected[number][:, :, mine] for mine in places]
        if number == 0 and case.ranks > 1:
            instead |= {
                "chunks that came back are joined as tokens, and are heads": mixed_up(
                    expected[0], places
                ).__getitem__,
                "tokens are sorted for attention, and not put back in the order in which they "
                "lie on the ranks": (partial(neighbours, expected[0], case.ranks)),
            }
        try:
            expect_everywhere(
                name.replace("out", "what is returned"),
                [result[name] for result in results],
                right,
                instead,
            )
        except Wrong as wrong:
            if number == 0 or "this is what comes out" in str(wrong) or case.ranks == 1:
                raise
            raise Wrong(
                f"{wrong}: what is returned is right, so the exchanges are, too, but not their "
                "backward, in which each chunk's gradient goes back to the rank that the chunk "
                "came from, and into its place there"
            ) from None
    for rank, result in enumerate(results):
        expect_bytes(case, rank, result)
    expect_collectives(notes)


def mixed_up(output: Array, places: Array) -> list[Array]:
    """Return what each rank has if heads and tokens are confused on the way back."""
    ranks, own = places.shape
    heads = output.shape[1]
    found = []
    for rank in range(ranks):
        mine = output[:, :, places[rank]]
        found.append(
            mine.reshape(*mine.shape[:1], ranks, heads // ranks, own, -1)
            .swapaxes(1, 2)
            .reshape(mine.shape)
        )
    return found


def only(carried: int, needed: int, story: int) -> bool:
    """Tell whether a story's bytes are those that were carried, and not by chance the right
    ones.
    """
    return story == carried != needed


def neighbours(output: Array, ranks: int, rank: int) -> Array:
    """Return the output of a rank's share of neighbouring positions."""
    return np.split(output, ranks, 2)[rank]


def expect_bytes(case: Case, rank: int, result: Arrays) -> None:
    """Raise `Wrong` unless all-to-alls carried what they should."""
    given = case.given[0]
    heads, groups = given["query"].shape[1], given["key"].shape[1]
    per_head = given["query"].nbytes // heads // case.ranks
    needed = (2 * heads + 2 * max(groups, case.ranks)) * per_head
    for phase in ("forward", "backward") if case.ranks > 1 else ():
        rows = result[phase].reshape(-1, 2).astype(int)
        if {COLLECTIVES[row[0]] for row in rows} == {"all_to_all"} and rows[:, 1].sum() == needed:
            continue
        stories = {
            "keys and values are repeated for all heads of queries": 4 * heads * per_head,
            "query, key and value are sent, and the result is not": needed - heads * per_head,
        }
        hint = contract.known(stories, partial(only, rows[:, 1].sum(), needed))
        if {COLLECTIVES[row[0]] for row in rows} & {"all_gather"}:
            hint = ": all tokens of all heads come to every rank, P times what it needs"
        wanted = f"all_to_alls of {needed} bytes together"
        raise Wrong(f"rank {rank}: {phase} calls {spelled(rows)}, expected {wanted}{hint}")
