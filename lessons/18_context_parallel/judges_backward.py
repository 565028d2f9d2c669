"""Lesson 18, task 2: the judge of the ring's backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from judges import HEADS, attention, causal, expect_everywhere, expect_ring, weights_of
from judges_products import BACKWARD, expect_shares
from torch import Tensor

from minidist.course.grader.contract import Array, Arrays, Case, Note

Terms: TypeAlias = list[list[Tensor | None]]  # by the queries' rank, and the keys'


def pieces(case: Case, lse_of: str, output_of: str, mask: str = "") -> dict[str, Terms]:
    """Return the gradients by query rank and key rank: lse and output are `merged`, or the
    `block`'s own.

    `mask`: every block is `causal`, or `none` is, or those of `later` ranks are seen as well.
    """
    time = case.given[0]["query"].shape[2]
    query, key, value = (torch.tensor(case.given[0][name]) for name in HEADS)
    gradient = torch.tensor(case.given[0]["gradient"])
    output, lse = attention(query, key, value, causal(time))
    cut = [x.chunk(case.ranks, 2) for x in (query, key, value, gradient, output, lse)]
    found: dict[str, Terms] = {
        name: [[None] * case.ranks for _ in range(case.ranks)] for name in HEADS
    }
    for mine in range(case.ranks):
        for source in range(case.ranks if mask == "later" else mine + 1):
            q, do, o, every = cut[0][mine], cut[3][mine], cut[4][mine], cut[5][mine]
            k, v = cut[1][source], cut[2][source]
            seen = causal(q.shape[2]) | torch.tensor(
                {"causal": False, "none": True, "later": source != mine}.get(mask, source < mine)
            )
            o_block, lse_block = attention(q, k, v, seen)
            o, every = (
                o_block if output_of == "block" else o,
                lse_block if lse_of == "block" else every,
            )
            p = (weights_of(q, k, seen)[0] - every[..., None]).exp()
            copies = q.shape[1] // k.shape[1]
            dp = do @ v.repeat_interleave(copies, 1).mT
            ds = p * (dp - (do * o).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5

            def shared(x: Tensor, groups: int = k.shape[1]) -> Tensor:
                return x.unflatten(1, (groups, -1)).sum(2)

            found["query"][mine][source] = ds @ k.repeat_interleave(copies, 1)
            found["key"][mine][source] = shared(ds.mT @ q)
            found["value"][mine][source] = shared(p.mT @ do)
    return found


def summed(terms: Sequence[Tensor | None]) -> Array:
    """Return the sum of what is there."""
    return torch.stack([term for term in terms if term is not None]).sum(0).numpy()


def of_rank(terms: dict[str, Terms], name: str, rank: int) -> Array:
    """Return a rank's gradient: of queries over all blocks, of keys and values over the queries of
    all ranks.
    """
    if name == "query":
        return summed(terms[name][rank])
    return summed([row[rank] for row in terms[name]])


def one_term(terms: Terms, rank: int) -> Array:
    """Return what a rank's own queries and keys have to do with each other."""
    return summed([terms[rank][rank]])


def last_term(terms: Terms, rank: int) -> Array:
    """Return what a rank's queries have to do with the block that comes to it last, that of rank
    0.
    """
    return summed([terms[rank][0]])


def row_sum(terms: Terms, rank: int) -> Array:
    """Return the sum of what a rank computes."""
    return summed(terms[rank])


def of_last(terms: Terms, rank: int) -> Array:
    """Return what the last rank's queries have to do with a rank's keys: it is the last to add a
    term.
    """
    return summed([terms[-1][rank]])


def of_left(terms: Terms, rank: int) -> Array:
    """Return the sum of what a rank's left neighbour computes."""
    return summed(terms[(rank - 1) % len(terms)])


def right_one(everyones: Sequence[Array], rank: int) -> Array:
    """Return what the right neighbour should have."""
    return everyones[(rank + 1) % len(everyones)]


def judge_backward(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As attention on one rank; keys go round, and their gradients go round and home."""
    whole = pieces(case, "merged", "merged")
    wrong = {
        "a block's own lse is used: each weight is exp(score - lse), with lse over the keys "
        "of *all* blocks": (
            "block",
            "merged",
        ),
        "a block's own output is used: rowsum(dO · O) needs the merged one": ("merged", "block"),
        "a block's own output and lse are used, as if it were all keys: it needs the merged ones": (
            "block",
            "block",
        ),
    }
    wrong |= {
        "all blocks are masked, also those of earlier ranks": ("merged", "merged", "causal"),
        "no block is masked, not even a rank's own": ("merged", "merged", "none"),
        "blocks of later ranks count as well: no query sees them": ("merged", "merged", "later"),
    }
    terms = {story: pieces(case, *which) for story, which in wrong.items()}
    for name in HEADS:
        everyones = [of_rank(whole, name, rank) for rank in range(case.ranks)]
        stories: dict[str, Callable[[int], Array]] = {}
        if name == "query":
            stories["only the rank's own keys count"] = partial(one_term, whole[name])
            stories["the terms of the block that comes last replace those of the blocks before"] = (
                partial(last_term, whole[name])
            )
        elif case.ranks > 1:
            stories = {
                "the last step is missing, which brings gradients home: they are those of the "
                "right neighbour's keys": (partial(right_one, everyones)),
                "terms stay where they are computed: those of all blocks are added on one rank": partial(
                    row_sum, whole[name]
                ),
                "the terms of other ranks' queries are missing": partial(one_term, whole[name]),
                "each rank's term replaces the sum that came to it, and is not added": partial(
                    of_last, whole[name]
                ),
                "sums stay where they are, and blocks alone travel: in the last step comes "
                "the left neighbour's": (partial(of_left, whole[name])),
            }
        if name != "query":
            other = "value" if name == "key" else "key"
            stories["the gradients of keys and values are exchanged"] = partial(
                of_rank, whole, other
            )
        stories |= {story: partial(of_rank, them, name) for story, them in terms.items()}
        expect_everywhere(
            f"the gradient of {name}", [result[name] for result in results], everyones, stories
        )
    expect_ring(
        case,
        notes,
        2 * case.ranks - 1 if case.ranks > 1 else 0,
        case.ranks if case.ranks > 1 else 0,
    )
    expect_shares(case, results, BACKWARD)
