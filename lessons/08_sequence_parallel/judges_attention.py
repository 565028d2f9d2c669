"""Lesson 08, tasks 4 and 5: the programs that run attention over all ranks, and their judges."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

import torch
from judges import HEADS, expect_calls, own, part
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minidist import Communicator
from minidist.collectives import COLLECTIVES
from minidist.course.grader import contract
from minidist.course.grader.calls import forward_backward, spelled
from minidist.course.grader.contract import Array, Arrays, Case, Figures, Note, Wrong, sent_by

BLOCKS_HELD = 6  # of keys and values, in ring attention


def run_ulysses(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4; before that with one head more than ranks."""
    refused, odd, before = True, torch.ones(1, comm.size + 1, 1, 2), comm.traffic.messages_sent
    with suppress(ValueError):
        exercise.ulysses_attention(odd, odd, odd, comm)
        refused = comm.size == 1
    sent = comm.traffic.messages_sent - before
    qkv = {name: own(given[name], comm, 2) for name in HEADS}
    found = forward_backward(
        comm, lambda: exercise.ulysses_attention(*qkv.values(), comm), qkv, own(given["gradient"], comm, 2)
    )
    return {**found, "refused": refused, "sent before": sent}


class Held(TorchFunctionMode):
    """The bytes of all storages that torch's functions return, but for `known` ones, as long as somebody keeps them."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self.known:
                self.made.add(each.untyped_storage())
        self.most = max(self.most, sum(storage.nbytes() for storage in self.made))
        return found


def run_ring(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5, and see how much is held at a time."""
    qkv = [own(given[name], comm, 2) for name in HEADS]
    with torch.no_grad(), Held(qkv) as held:
        out = exercise.ring_attention(*qkv, comm)
    return {"out": out.numpy(), "held": held.most}


Counted: TypeAlias = Callable[[Tensor, Tensor, int], Tensor]  # of queries and keys, by place, and T/P: which count


def causal(query: Tensor, key: Tensor, own: int) -> Tensor:
    """Count every key up to the query's own."""
    return key <= query


def whole_attention(given: Arrays, ranks: int, counted: Counted = causal) -> tuple[Tensor, list[Tensor]]:
    """Return attention over all tokens, as it is written, and the gradients of queries, keys and values."""
    q, k, v = (torch.tensor(given[name], requires_grad=True) for name in HEADS)
    place = torch.arange(q.shape[2])
    hidden = ~counted(place[:, None], place, q.shape[2] // ranks)
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1) @ v
    out.backward(torch.tensor(given["gradient"]))
    return out.detach(), [q.grad, k.grad, v.grad]


WRONGLY_COUNTED: dict[str, Counted] = {
    "the keys of later ranks count as well": lambda q, k, own: (k <= q) | (k // own != q // own),
    "a rank's own keys count only": lambda q, k, own: (k <= q) & (k // own == q // own),
    "the causal mask hides keys of earlier ranks, too": lambda q, k, own: (k // own <= q // own) & (k % own <= q % own),
    "no key is hidden": lambda q, k, own: (k == k) | (q == q),
}


def never_rescaled(case: Case, rank: int) -> Array:
    """Return a rank's attention if each block's own largest score is subtracted, and nothing corrected for that."""
    query, key, value = (torch.tensor(case.given[0][name]).chunk(case.ranks, 2) for name in HEADS)
    normalizer, total = torch.zeros(()), torch.zeros(())
    for source in range(rank + 1):
        scores = query[rank] @ key[source].transpose(-1, -2) / query[rank].shape[-1] ** 0.5
        if source == rank:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        normalizer, total = normalizer + weights.sum(-1, keepdim=True), total + weights @ value[source]
    return (total / normalizer).numpy()


def wrong_attention(case: Case, rank: int, name: str = "") -> dict[str, Any]:
    """Return what known mistakes give on a rank: of the result, or of the gradient of query, key or value."""

    def of(counted: Counted) -> Array:
        out, gradients = whole_attention(case.given[0], case.ranks, counted)
        return part((gradients[HEADS.index(name)] if name else out).numpy(), case, rank, 2)

    return {story: partial(of, counted) for story, counted in WRONGLY_COUNTED.items()}


def judge_ulysses(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As attention on one rank; four tensors' worth of all-to-all, and as much back."""
    out, gradients = whole_attention(case.given[0], case.ranks)
    for rank, result in enumerate(results):
        if int(result["sent before"]):
            raise Wrong(f"rank {rank} sends messages before it refuses {case.ranks + 1} heads: look at H first")
        expected, instead = part(out.numpy(), case, rank, 2), wrong_attention(case, rank)
        contract.expect_close(rank, "what forward returns", result["out"], expected, instead=instead)
        for name, gradient in zip(HEADS, gradients, strict=True):
            found, expected = result[f"the gradient of {name}"], part(gradient.numpy(), case, rank, 2)
            instead = wrong_attention(case, rank, name)
            contract.expect_close(rank, f"the gradient of {name}", found, expected, instead=instead)
        needed = 4 * out.nbytes // case.ranks
        for phase in ("forward", "backward"):
            rows = result[phase].reshape(-1, 2).astype(int)
            if {COLLECTIVES[row[0]] for row in rows} != {"all_to_all"} or rows[:, 1].sum() != needed:
                wanted = f"all_to_alls of {needed} bytes together"
                raise Wrong(f"rank {rank}: {phase} calls {spelled(rows)}, expected {wanted}")
        if not result["refused"]:
            raise Wrong(f"rank {rank}: ulysses_attention raises no ValueError for {case.ranks + 1} heads")
    expect_calls(results, notes, 0)


def judge_ring(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As attention on one rank; keys and values go to the right, P - 1 times."""
    out, _ = whole_attention(case.given[0], case.ranks)
    steps, bytes = case.ranks - 1, 2 * out.nbytes // case.ranks
    for rank, result in enumerate(results):
        expected, instead = part(out.numpy(), case, rank, 2), wrong_attention(case, rank)
        instead["what was added up is not rescaled when a larger score comes"] = partial(never_rescaled, case, rank)
        contract.expect_close(rank, "what is returned", result["out"], expected, instead=instead)
        sent, right = sent_by(rank, notes), (rank + 1) % case.ranks
        for note in notes:
            if note.kind not in ("send", "call") or any(
                name.startswith("minidist.collectives") for name in note.through
            ):
                raise Wrong(f"rank {note.rank} uses a collective or comm.{note.kind} at {note.line}: exchange only")
        if any(note.to != right for note in sent):
            raise Wrong(f"rank {rank} sends to {sorted({note.to for note in sent})}, expected to {right} only")
        if sum(note.bytes for note in sent) != steps * bytes or len(sent) > 2 * steps:
            found = f"{sum(note.bytes for note in sent)} bytes in {len(sent)} messages"
            raise Wrong(f"rank {rank} sends {found}, expected {steps * bytes} bytes in {steps} or {2 * steps}")


def judge_ring_memory(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """All of that, and a rank holds a few blocks at a time, not those of all ranks."""
    judge_ring(case, results, notes)
    block = sum(case.given[0][name].nbytes for name in ("key", "value")) // case.ranks
    for rank, result in enumerate(results):
        if (held := int(result["held"])) > BLOCKS_HELD * block:
            raise Wrong(
                f"rank {rank} holds {held} bytes at a time, expected at most {BLOCKS_HELD * block}, {BLOCKS_HELD} "
                f"times its keys and values: the keys of all {case.ranks} ranks are never to be together"
            )
    return {"bytes held in ring attention": max(int(result["held"]) for result in results)}
