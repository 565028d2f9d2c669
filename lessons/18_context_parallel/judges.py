"""Lesson 18, task 2: the programs that run beside an answer, and their judges."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from judges_products import FORWARD, Products, expect_shares
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.compare import is_close
from minidist.course.grader.contract import Array, Arrays, Case, Figures, Note, Wrong, sent_by

HEADS = ("query", "key", "value")
BLOCKS_HELD = 8  # of keys and values, in a ring's forward

# ---------------------------------------------------------------- attention, as it is written


def weights_of(query: Tensor, key: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and lse; queries share keys, and see those where `seen` [Tq, Tk] is true."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores, scores.logsumexp(-1)


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and lse; they have gradients."""
    scores, lse = weights_of(query, key, seen)
    return scores.softmax(-1) @ value.repeat_interleave(query.shape[1] // key.shape[1], 1), lse


def leaves_of(given: Arrays) -> list[Tensor]:
    """Return query, key and value of all tokens, with gradients to come."""
    return [torch.tensor(given[name], requires_grad=True) for name in HEADS]


def own(array: Array, comm: Communicator) -> Tensor:
    """Return this rank's tokens, of neighbours; not contiguous, as a model's are."""
    x = torch.tensor(array).chunk(comm.size, 2)[comm.rank]
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def part(x: Tensor, case: Case, rank: int) -> Array:
    """Return a rank's tokens, of neighbours."""
    found: Array = x.detach().chunk(case.ranks, 2)[rank].numpy()
    return found


def causal(time: int) -> Tensor:
    """Return which of `time` queries see which keys."""
    return torch.ones(time, time, dtype=torch.bool).tril()


def expect_everywhere(
    name: str,
    found: Sequence[Array],
    expected: Sequence[Array],
    instead: Mapping[str, Callable[[int], Array]],
) -> None:
    """Hold what each rank has against what it should have; of the mistakes, that which explains
    most ranks is told.

    `instead` maps a story to what returns, by rank, what comes out of it.
    """
    found, expected = without_noise(found, expected)

    def everyones(of: Callable[[int], Array]) -> list[Array]:
        return [of(rank) for rank in range(len(found))]

    if all(map(partial(is_close, tolerance=1e-9), found, expected)):
        ways = {story: partial(everyones, of) for story, of in instead.items()}
        contract.expect_ranks(name, found, expected, instead=ways)
        return
    given = {story: everyones(of) for story, of in instead.items()}
    fits = {
        story: sum(map(partial(is_close, tolerance=1e-9), found, them))
        for story, them in given.items()
    }
    by_fit = sorted(given, key=lambda story: -fits[story])
    contract.expect_ranks(name, found, expected, instead={story: given[story] for story in by_fit})


NOISE = 1e-12  # of the largest value of all ranks: what rounding leaves where 0 is right


def without_noise(
    found: Sequence[Array], expected: Sequence[Array]
) -> tuple[list[Array], list[Array]]:
    """Return both, with exact zeros on ranks of which nothing but 0 is expected: a query that sees
    one key, say.
    """
    least = NOISE * max(float(np.abs(each).max(initial=0)) for each in expected)
    silent = [bool((np.abs(each) <= least).all()) for each in expected]
    cleaned = [
        np.where(np.abs(mine) <= least, 0.0, mine) if quiet else mine
        for quiet, mine in zip(silent, found, strict=True)
    ]
    return cleaned, [
        0 * right if quiet else right for quiet, right in zip(silent, expected, strict=True)
    ]


# ---------------------------------------------------------------- task 2


class Held(TorchFunctionMode):
    """The bytes of all storages that torch's functions return, but for `known` ones, as long as
    somebody keeps them.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self.known:
                self.made.add(each.untyped_storage())
        self.most = max(self.most, sum(storage.nbytes() for storage in self.made))
        return found


def run_forward(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the ring's forward, and see how much is held at a time."""
    qkv = [own(given[name], comm) for name in HEADS]
    with (
        contract.untouched(**dict(zip(HEADS, qkv, strict=True))),
        torch.no_grad(),
        Held(qkv) as held,
        Products() as products,
    ):
        output, lse = exercise.ring_forward(*qkv, comm)
    found = {"output": output.numpy(), "lse": lse.numpy()}
    return found | {"held": held.most, "products": products.count, "loose": products.loose}


def run_backward(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the ring's backward, with the output and lse that its forward should return."""
    whole = [torch.tensor(given[name]) for name in HEADS]
    output, lse = attention(*whole, causal(whole[0].shape[2]))
    qkv = [own(given[name], comm) for name in HEADS]
    merged = [own(output.numpy(), comm), own(lse[..., None].numpy(), comm)[..., 0].contiguous()]
    arguments = [own(given["gradient"], comm), *qkv, *merged]
    names = ("gradient", *HEADS, "output", "lse")
    with (
        contract.untouched(**dict(zip(names, arguments, strict=True))),
        torch.no_grad(),
        Products() as products,
    ):
        returned = exercise.ring_backward(*arguments, comm)
    found = {name: gradient.numpy() for name, gradient in zip(HEADS, returned, strict=True)}
    return found | {"products": products.count, "loose": products.loose}


Seen: TypeAlias = Callable[[Tensor, Tensor, int], Tensor]  # of queries and keys, by place, and T/P

WRONGLY_SEEN: dict[str, Seen] = {
    "the keys of later ranks count as well": lambda q, k, own: (k <= q) | (k // own != q // own),
    "a rank's own keys count only": lambda q, k, own: (k <= q) & (k // own == q // own),
    "the causal mask hides keys of earlier ranks, too": lambda q, k, own: (
        (k // own <= q // own) & (k % own <= q % own)
    ),
    "a rank's own block is not masked: its queries see later keys of their own rank": lambda q, k, own: (
        k // own <= q // own
    ),
    "a rank's own block is left out": lambda q, k, own: k // own < q // own,
    "the mask of a rank's own block hides a query's own key, too": lambda q, k, own: (
        (k < q) | (q % own == 0) & (k == q)
    ),
    "no key is hidden": lambda q, k, own: (k == k) | (q == q),
    "the blocks of earlier ranks are skipped, and those of later ones count": (
        lambda q, k, own: ((k <= q) & (k // own == q // own)) | (k // own > q // own)
    ),
    "the block that comes last is left out": lambda q, k, own: (
        (k <= q) & ((k // own > 0) | (q // own < q.max() // own))
    ),
}


def wrongly_seen(case: Case) -> dict[str, Callable[[int], Array]]:
    """Return what a rank's output is if its queries see others than they should."""
    qkv = [torch.tensor(case.given[0][name]) for name in HEADS]
    place = torch.arange(qkv[0].shape[2])

    def of(seen: Seen, rank: int) -> Array:
        return part(
            attention(*qkv, seen(place[:, None], place, len(place) // case.ranks))[0], case, rank
        )

    def exchanged(rank: int) -> Array:
        seen = place <= place[:, None]
        return part(attention(qkv[0], qkv[2], qkv[1], seen)[0], case, rank)

    def passed_on(rank: int) -> Array:
        query, key, value = (x.chunk(case.ranks, 2) for x in qkv)
        left, time = (rank - 1) % case.ranks, query[0].shape[2]
        blocks = [rank] + [left] * rank
        seen = torch.cat([causal(time)] + [torch.ones(time, time, dtype=torch.bool)] * rank, 1)
        keys, values = (torch.cat([x[block] for block in blocks], 2) for x in (key, value))
        return attention(query[rank], keys, values, seen)[0].numpy()

    return {story: partial(of, seen) for story, seen in WRONGLY_SEEN.items()} | {
        "keys and values are exchanged": exchanged,
        "a rank sends its own block in every step, not the one that came to it": passed_on,
    }


def merged_plainly(case: Case, rank: int) -> Array:
    """Return a rank's output if those of its blocks are averaged."""
    query, key, value = (torch.tensor(case.given[0][name]).chunk(case.ranks, 2) for name in HEADS)
    time = query[0].shape[2]
    outputs = [
        attention(
            query[rank], key[source], value[source], causal(time) | torch.tensor(source < rank)
        )[0]
        for source in range(rank + 1)
    ]
    return torch.stack(outputs).mean(0).numpy()


def judge_forward(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As attention on one rank; keys and values go to the right, P - 1 times."""
    qkv = [torch.tensor(case.given[0][name]) for name in HEADS]
    output, lse = attention(*qkv, causal(qkv[0].shape[2]))
    instead = wrongly_seen(case) | {
        "the blocks' outputs are averaged, without weights": partial(merged_plainly, case)
    }
    for name, whole, stories in (("output", output, instead), ("lse", lse, {})):
        expected = [part(whole, case, rank) for rank in range(case.ranks)]
        expect_everywhere(f"the {name}", [result[name] for result in results], expected, stories)
    expect_ring(case, notes, case.ranks - 1, case.ranks - 1)
    expect_shares(case, results, FORWARD)


def judge_memory(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """All of that, and a rank holds a few blocks at a time, not those of all ranks."""
    judge_forward(case, results, notes)
    block = block_of(case)
    for rank, result in enumerate(results):
        if (held := int(result["held"])) > BLOCKS_HELD * block:
            raise Wrong(
                f"rank {rank} holds {held} bytes at a time, expected at most "
                f"{BLOCKS_HELD * block}, {BLOCKS_HELD} times its keys and values: the keys of all "
                f"{case.ranks} ranks are never to be together"
            )
    return {"bytes held in ring attention": max(int(result["held"]) for result in results)}


def block_of(case: Case) -> int:
    """Return the bytes of the keys and values of one rank."""
    return sum(case.given[0][name].nbytes for name in ("key", "value")) // case.ranks


def expect_ring(case: Case, notes: Sequence[Note], blocks: int, steps: int) -> None:
    """Raise `Wrong` unless each rank sends so many blocks to its right, each in at most two
    messages.
    """
    block, given = block_of(case), case.given[0]
    copies = given["query"].shape[1] // given["key"].shape[1]
    for note in notes:
        if note.kind not in ("send", "call") or any(
            name.startswith("minidist.full.collectives") for name in note.through
        ):
            raise Wrong(
                f"{note.line} uses a collective or comm.{note.kind}: use comm.exchange only"
            )
    for rank in range(case.ranks):
        sent, right = sent_by(rank, notes), (rank + 1) % case.ranks
        if any(note.to != right for note in sent):
            others = sorted({note.to for note in sent})
            raise Wrong(
                f"rank {rank} sends to {others}, expected to {right} only: a rank passes on what "
                "came to it"
            )
        bytes = sum(note.bytes for note in sent)
        if bytes != blocks * block or not steps <= len(sent) <= 2 * blocks:
            stories = {
                f"keys and values are repeated for the {copies} heads that share them, before "
                "they are sent": (copies > 1 and copies * blocks * block),
                "keys and values travel home, too, where nobody needs them": blocks > steps
                and (blocks + 1) * block,
                "a block goes all the way round, back to its own rank": blocks == steps
                and (blocks + 1) * block,
                "the gradients do not make the last step, home": blocks > steps
                and (blocks - 1) * block,
                "only keys, or only values, are sent": blocks * block / 2,
                "the gradients do not travel": blocks > steps and steps * block,
            }
            hint = contract.known(
                stories, lambda value, sent=bytes: value is not False and value == sent
            )
            found = f"{bytes} bytes in {len(sent)} messages"
            raise Wrong(
                f"rank {rank} sends {found}, expected {blocks * block} bytes, {blocks} blocks, in "
                f"{steps} to {2 * blocks} messages{hint}"
            )
