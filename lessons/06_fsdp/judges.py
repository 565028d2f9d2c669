"""Lesson 06, tasks 1 and 2: the programs that run beside an answer, and their judges."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minidist import Communicator
from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    expect_close,
    expect_equal,
    expect_ranks,
    known,
)

HELD = ": autograd keeps what it has saved, until the storage itself is resized to 0"


class Block(nn.Module):
    """A unit: x + tanh(x W1ᵀ + b1) W2ᵀ, which calls `look` in the midst of its forward and of its
    backward.
    """

    def __init__(self, weights: Sequence[Array], look: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.look = look
        self.first, self.bias, self.second = (
            nn.Parameter(torch.tensor(weight)) for weight in weights
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, D] of [B, D]."""
        hidden = torch.tanh(x @ self.first.T + self.bias)
        self.look()
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.look())
        return x + hidden @ self.second.T


class Memory:
    """The whole parameters of modules: all storages that they had at some time, as far as these are
    alive.
    """

    def __init__(self, weights: Sequence[Sequence[Array]]) -> None:
        self.modules = [Block(each, self.look) for each in weights]
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.held: list[int] = []  # at each mark
        self.marks: list[int] = []  # messages that were sent until then
        self.most = [0, 0]  # bytes, and modules with whole gradients, when something looked
        self.bytes()

    def bytes(self) -> int:
        """Return what is held now. A storage of one number, which stands in for a whole tensor,
        does not count.
        """
        self.seen.update(
            p.untyped_storage() for module in self.modules for p in module.parameters()
        )
        return sum(storage.nbytes() for storage in self.seen if storage.nbytes() > 8)

    def look(self) -> None:
        """Note what is held in the midst of a unit."""
        whole = [
            module
            for module in self.modules
            if any(p._grad is not None for p in module.parameters())
        ]
        self.most = [max(self.most[0], self.bytes()), max(self.most[1], len(whole))]

    def mark(self, comm: Communicator) -> None:
        """Note what is held between two calls, and how many messages there were."""
        self.held.append(self.bytes())
        self.marks.append(comm.traffic.messages)


def parts(given: Arrays) -> list[list[Array]]:
    """Return the weights of each block."""
    return [
        [given[f"{unit}.{part}"] for part in range(3)] for unit in range(int(given["sizes"][0]))
    ]


def cutting(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1 on parameters, and the other way on their values."""
    parameters = [nn.Parameter(torch.tensor(value)) for value in given.values()]
    shard, held = exercise.cut(parameters, comm)
    if shard.requires_grad:
        raise Wrong(
            "the shard requires a gradient, expected none: detach it, or autograd follows every "
            "use of it"
        )
    whole = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.float64)
    views = exercise.views_into(whole, parameters)
    # views show it, copies do not
    whole.copy_(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    found = {f"parameter {number}": view.detach().numpy() for number, view in enumerate(views)}
    found |= {"shard": shard.detach().numpy(), "held": np.array(held).reshape(len(parameters), 2)}
    return found | {"its memory": shard.untyped_storage().nbytes()}


def come_and_go(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2: build, gather, use, release, gather, backward, release, change the shard, gather,
    release.
    """
    memory = Memory(parts(given))
    block, parameters = memory.modules[0], list(memory.modules[0].parameters())
    shapes = [tuple(parameter.shape) for parameter in parameters]
    unit = exercise.ShardedUnit(block, comm)
    found = {"shard": unit.shard.detach().clone().numpy()}
    for stage in range(3):
        memory.mark(comm)
        unit.gather()
        expect_same(block, parameters, shapes)
        found[f"whole {stage}"] = flat(block.parameters())
        if stage == 0:
            output = block(torch.tensor(given["x"][0]))
        elif stage == 1:
            output.backward(torch.tensor(given["gradient"][0]))
        unit.release()
        with torch.no_grad():
            unit.shard += stage  # changed before the last gathering
    memory.mark(comm)
    if any(parameter.grad is None for parameter in parameters):
        raise Wrong("backward between gather and release left no gradient of a parameter")
    found["gradient"] = flat(parameter.grad for parameter in parameters)
    return found | {"held": memory.held, "marks": memory.marks}


def expect_same(
    block: Block, parameters: Sequence[nn.Parameter], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raise `Wrong` unless the block still has these parameters, whole, and in float64."""
    if any(now is not before for now, before in zip(block.parameters(), parameters, strict=True)):
        raise Wrong(
            "the module has other nn.Parameter objects now: an optimizer would step the old ones"
        )
    if found := [parameter.dtype for parameter in parameters if parameter.dtype != torch.float64]:
        raise Wrong(f"after gather a parameter is {found[0]}, expected torch.float64, as before")
    for parameter, shape in zip(parameters, shapes, strict=True):
        if (now := tuple(parameter.shape)) != shape:
            raise Wrong(
                f"after gather a parameter has shape {now}, expected {shape}, as before: `release` "
                "frees the memory and leaves the shapes, or `gather` assigns `data` again"
            )


def judge_cut(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The shards are `array_split`'s, own their memory, and say what they hold; views show what is
    written.
    """
    whole = np.concatenate([value.ravel() for value in case.given[0].values()])
    shards = np.array_split(whole, case.ranks)
    expect_ranks(
        "the shard", [result["shard"] for result in results], shards, 0.0, instead=other_cuts(case)
    )
    for rank, result in enumerate(results):
        # of the shard among all elements, then within each parameter
        start = sum(map(len, shards[:rank]))
        if (found := int(result["its memory"])) > (most := max(shards[rank].nbytes, 8)):
            raise Wrong(
                f"rank {rank}: the shard keeps {found} bytes alive, expected {most}: a view is no "
                "copy"
            )
        for number, value in enumerate(case.given[rank].values()):
            first, last = (min(max(at, 0), value.size) for at in (start, start + len(shards[rank])))
            pair = result["held"][number].tolist()
            if pair != [first, last] and (first < last or pair[0] != pair[1]):
                known_pairs = {
                    "the second number is how many it holds, not where they end": [
                        first,
                        last - first,
                    ],
                    "the second number is the last element that it has, not the first that it "
                    "has not": [
                        first,
                        last - 1,
                    ],
                    "they are counted from 1": [first + 1, last + 1],
                    "they are not kept between 0 and the parameter's size": [
                        start,
                        start + len(shards[rank]),
                    ],
                    "they are places in the shard, not in the parameter": [
                        max(0, -start),
                        max(0, -start) + last - first,
                    ],
                }
                if places_in_the_whole(case, results):
                    known_pairs = {
                        "they are places among all parameters, laid end to end, not places "
                        "inside the parameter": pair
                    }
                hint = known(known_pairs, pair.__eq__)
                says = (
                    f"rank {rank} says that it holds {pair} of parameter {number}, expected "
                    f"{[first, last]}"
                )
                raise Wrong(says + hint)
            found, begins = (
                result[f"parameter {number}"],
                sum(one.size for one in list(case.given[rank].values())[:number]),
            )
            instead = {
                "views are copies, which do not show what is written into the whole later": np.zeros_like(
                    value
                )
            }
            if found.size == value.size:
                for at in range(len(whole) - value.size + 1):
                    story = f"the view begins at element {at} of the whole, not at {begins}"
                    instead[story] = (
                        whole[at : at + value.size].reshape(found.shape) if at != begins else value
                    )
                instead["the view is flat, and has not the parameter's shape"] = value.ravel()
            expect_equal(
                rank, f"view {number}, after its whole was written,", found, value, instead=instead
            )
            start -= value.size
    if sent := [note for note in notes if note.kind == "send"]:
        raise Wrong(f"rank {sent[0].rank} sent a message ({sent[0].line}): cutting needs none")


def other_cuts(case: Case) -> dict[str, list[Array]]:
    """Return every rank's shard by each mistake."""
    parameters, ranks = [value.ravel() for value in case.given[0].values()], range(case.ranks)
    whole = np.concatenate(parameters)
    most, least = -(-len(whole) // case.ranks), len(whole) // case.ranks
    parts = np.array_split(whole, case.ranks)
    return {
        "all parts but the last are rounded up, as by torch.chunk": [
            whole[rank * most : (rank + 1) * most] for rank in ranks
        ],
        "each parameter is cut for itself, not all of them end to end": [
            np.concatenate([np.array_split(each, case.ranks)[rank] for each in parameters])
            for rank in ranks
        ],
        "all parts are rounded down, and the last one has what is left": [
            whole[rank * least : (rank + 1) * least if rank < case.ranks - 1 else None]
            for rank in ranks
        ],
        "all parts are rounded down, and what is left is in none": [
            whole[rank * least : (rank + 1) * least] for rank in ranks
        ],
        "the longer parts come last, not first": np.split(
            whole, np.cumsum([len(part) for part in parts[::-1]])[:-1]
        ),
        "elements are dealt out one by one, like cards": [
            whole[rank :: case.ranks] for rank in ranks
        ],
    }


def places_in_the_whole(case: Case, results: Sequence[Arrays]) -> bool:
    """Tell whether on every rank `held` gives places among all parameters, laid end to end."""
    sizes = [value.size for value in case.given[0].values()]
    ends = np.cumsum(sizes)
    cuts = np.cumsum([0, *map(len, np.array_split(np.arange(ends[-1]), case.ranks))])
    for rank, result in enumerate(results):
        first = np.maximum(ends - sizes, cuts[rank])
        last = np.minimum(ends, cuts[rank + 1])
        holds = first < last
        if not np.array_equal(result["held"][holds], np.stack([first, last], 1)[holds]):
            return False
    return True


def judge_unit(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everything of task 2, and the bytes of each gathering."""
    judge_unit_values(case, results, notes)
    expected = (case.ranks - 1) * sum(weight.nbytes for weight in parts(case.given[0])[0])
    for stage in range(3):
        if (found := sent_between(results, notes, stage).sum()) != expected:
            twice = ": an all-reduce sends twice what an all-gather does" * bool(
                found == 2 * expected
            )
            raise Wrong(
                f"in gather number {stage + 1} all ranks together sent {found} bytes, "
                f"expected {expected}{twice}"
            )


def judge_unit_values(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Shards and wholes are right, at first and after the change; nothing is held between uses;
    backward works.
    """
    before = np.concatenate([weight.ravel() for weight in parts(case.given[0])[0]])
    for rank, result in enumerate(results):
        expect_equal(rank, "the shard", result["shard"], np.array_split(before, case.ranks)[rank])
        for stage, expected in enumerate((before, before, before + 1)):
            name, old = (
                f"what gather number {stage + 1} brought",
                {"the shard is gathered as it was at first": before},
            )
            parts_of, own = np.array_split(expected, case.ranks), np.zeros(len(expected), bool)
            np.array_split(own, case.ranks)[rank][:] = True
            old["only the rank's own shard is copied into the whole"] = np.where(own, expected, 0)
            for order in permutations(range(case.ranks)) if case.ranks <= 4 else ():
                story = (
                    f"shards are put together in the order of ranks {', '.join(map(str, order))}"
                )
                if list(order) != sorted(order):
                    old[story] = np.concatenate([parts_of[other] for other in order])
            expect_equal(rank, name, result[f"whole {stage}"], expected, instead=old)
        expect_free(
            rank,
            result,
            "the constructor",
            "the first release",
            "the second release",
            "the last release",
        )
        block = Block(parts(case.given[rank])[0])
        run(block, case.given[rank])
        expected = flat(parameter.grad for parameter in block.parameters())
        expect_close(rank, "the gradient of backward after a release", result["gradient"], expected)


def expect_free(rank: int, result: Arrays, *moments: str) -> None:
    """Raise `Wrong` unless no whole parameters were held at these moments."""
    for moment, held in zip(moments, result["held"].tolist(), strict=True):
        if held:
            raise Wrong(
                f"rank {rank}: after {moment} whole parameters still have {held} bytes, expected "
                f"0{HELD}"
            )


def sent_between(results: Sequence[Arrays], notes: Sequence[Note], stage: int) -> Array:
    """Return the bytes that were sent between two marks, [sender, receiver]."""
    sent = np.zeros((len(results), len(results)), dtype=int)
    for rank, messages in enumerate(messages_between(results, notes, stage)):
        for note in messages:
            sent[rank, note.to] += note.bytes
    return sent


def messages_between(
    results: Sequence[Arrays], notes: Sequence[Note], stage: int
) -> list[list[Note]]:
    """Return the messages that each rank sent between two marks."""
    found = []
    for rank, result in enumerate(results):
        messages = [
            note for note in notes if note.rank == rank and note.kind in ("send", "barrier")
        ]
        found.append(messages[slice(*result["marks"][stage : stage + 2].tolist())])
    return found


def run(model: nn.Module, given: Arrays, step: int = 0) -> Array:
    """Return the output of what one rank is given; its gradients are added to those that are
    there.
    """
    output = model(torch.tensor(given["x"][step]))
    output.backward(torch.tensor(given["gradient"][step]))
    return output.detach().numpy()


def flat(tensors: Iterable[Tensor | None]) -> Array:
    """Return tensors end to end."""
    return torch.cat(
        [tensor.detach().flatten() for tensor in tensors if tensor is not None]
    ).numpy()
