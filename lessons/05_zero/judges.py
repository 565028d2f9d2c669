"""Lesson 05, tasks 2 and 3: the programs that run beside an answer, and their judges."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from minidist import Communicator
from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    expect_close,
    expect_equal,
)

SHAPES = ((5, 3), (5,), (2, 5), (2,))  # of weights and biases
SIZES = tuple(int(np.prod(shape)) for shape in SHAPES)
ITEM, RATE = 8, 0.05
# parameters, gradients, optimizer
BYTES = {"mixed": (2, 2, 12), "float32": (4, 4, 8), "8-bit moments": (2, 2, 6)}


class Stack(nn.Module):
    """Two layers."""

    def __init__(self, given: Arrays) -> None:
        super().__init__()
        pieces = zip(torch.tensor(given["parameters"]).split(SIZES), SHAPES, strict=True)
        self.values = nn.ParameterList(piece.reshape(shape) for piece, shape in pieces)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [B, 2] of [B, 3]."""
        hidden = nn.functional.linear(inputs, self.values[0], self.values[1]).tanh()
        return nn.functional.linear(hidden, self.values[2], self.values[3])


def loss_of(
    model: nn.Module, inputs: Tensor, targets: Tensor, rank: int = 0, ranks: int = 1
) -> Tensor:
    """Return what a rank brings to the loss of a batch: of one rank, the loss."""
    mine, wanted = inputs.tensor_split(ranks)[rank], targets.tensor_split(ranks)[rank]
    return (model(mine) - wanted).square().sum() / len(inputs)


def flat(tensors: Any) -> np.ndarray[Any, Any]:
    """Return tensors one after the other; for one that is missing, what is not a number."""
    return torch.cat(
        [torch.full((1,), torch.nan) if t is None else t.detach().flatten() for t in tensors]
    ).numpy()


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def sharded(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 or 3 in a loop; count how many of the model's gradients are held when another
    comes.
    """
    model, passed, held, kept = Stack(given), list[StorageWeakRef](), list[int](), list[list[int]]()
    now = SimpleNamespace(step=0, under_way=0)

    def look(new: Any = None) -> None:
        there = sum(
            parameter._grad is not None for parameter in model.parameters() if parameter is not new
        )
        held.append(max(there, sum(not memory.expired() for memory in passed)))
        # once is enough, and by then there is a state
        if now.step == 1 and (new is None or given["stage"] == 2):
            slices, gradients, state, rest = bytes_kept(zero, model)
            midst = [0, 0, 0, 0, gradients + rest - now.under_way]
            kept.append([slices, gradients, state, rest, 0] if new is None else midst)
        if new is not None:
            passed.append(StorageWeakRef(new.grad.untyped_storage()))
            # when the next one comes this may still be on its way, in a buffer
            now.under_way = new.nbytes

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    zero = (exercise.ZeRO1 if given["stage"] == 1 else exercise.ZeRO2)(model, comm, RATE)
    results, before = dict[str, Any](), comm.traffic.bytes_sent
    for inputs, targets in zip(
        torch.tensor(given["inputs"]), torch.tensor(given["targets"]), strict=True
    ):
        zero.zero_grad()
        for piece in zero.slices if given["there"] else ():  # what `reduce` is to replace
            piece.grad = torch.zeros_like(piece) if piece.grad is None else piece.grad
            piece.grad.fill_(float(given["there"]))
        now.under_way = 0
        for some, wanted in zip(inputs, targets, strict=True):
            loss_of(model, some, wanted, comm.rank, comm.size).backward()
        zero.reduce()
        results.setdefault("gradient", flat(piece.grad for piece in zero.slices))
        look()
        passed.clear()
        zero.step()
        look()
        now.step += 1
    states = list(zero.adamw.state.values())
    results |= {
        "bytes": comm.traffic.bytes_sent - before,
        "held": held,
        "parameters": flat(model.parameters()),
    }
    results |= {
        "state": sum(value.numel() for state in states for value in state.values() if value.dim())
    }
    results |= {"kept": np.array(kept).max(0)}
    return results | {
        "slices": [len(piece) for piece in zero.slices],
        "steps": [float(s["step"]) for s in states],
    }


def bytes_kept(zero: Any, model: nn.Module) -> list[int]:
    """Return the bytes of slices, of their gradients, of AdamW's state, and of what else an answer
    refers to.

    Storages count, whole, since a view keeps all of what it is a view of; the model's parameters
    and gradients do not.
    """
    seen = {
        one.untyped_storage().data_ptr()
        for p in model.parameters()
        for one in (p, p._grad)
        if one is not None
    }

    def bytes(tensors: Iterator[Any]) -> int:
        found = 0
        for storage in (each.untyped_storage() for each in tensors if each is not None):
            if storage.nbytes() > ITEM and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found += storage.nbytes()
        return found

    states = chain.from_iterable(state.values() for state in zero.adamw.state.values())
    own = [bytes(iter(zero.slices)), bytes(piece.grad for piece in zero.slices)]
    return [
        *own,
        bytes(each for each in states if isinstance(each, Tensor)),
        bytes(tensors_of(zero, model)),
    ]


def tensors_of(zero: Any, model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that an answer reaches: by its attributes, its hooks, and the variables of
    its module.
    """
    home, seen = type(zero).__module__, set[int]()
    waiting: list[Any] = [zero, model, *type(zero).__init__.__globals__.values()]
    while waiting:
        each = waiting.pop()
        foreign = isinstance(each, type) and each.__module__ != home
        if id(each) in seen or foreign or isinstance(each, ModuleType | Communicator):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
            waiting.append(each._grad)
        if isinstance(each, FunctionType):
            waiting += [*(each.__closure__ or ()), *(each.__defaults__ or ())]
        elif isinstance(each, type):
            waiting += vars(each).values()
        else:
            waiting += gc.get_referents(each)


# ---------------------------------------------------------------- judges: in the grader's process


def serial(
    given: Arrays,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    forgets: bool = True,
    only_last: bool = False,
    divided_by: float = 1,
    rate: float = RATE,
) -> dict[str, Any]:
    """Return the first gradient, by parameter, and the last parameters of a run on one rank, right
    or by a mistake.
    """
    model, found = Stack(given), dict[str, Any]()
    steps = optimizer(model.parameters(), lr=rate)
    for inputs, targets in zip(
        torch.tensor(given["inputs"]), torch.tensor(given["targets"]), strict=True
    ):
        if forgets:
            steps.zero_grad()
        for some, wanted in zip(inputs, targets, strict=True):
            if only_last:
                steps.zero_grad()
            (loss_of(model, some, wanted) / divided_by).backward()
        found.setdefault(
            "gradient", [parameter.grad.flatten().clone() for parameter in model.parameters()]
        )
        steps.step()
    return found | {"parameters": flat(model.parameters())}


def expect(who: str, what: str, found: Any, expected: object, why: str = "") -> None:
    """Raise `Wrong` unless counts, or lists of them, are equal."""
    if found.tolist() != expected:
        raise Wrong(f"{who}: {what} {found.tolist()}, expected {expected}" + f": {why}" * bool(why))


def judge_sharded(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The serial numbers, from slices, for the bytes of an all-reduce; in stage 2 no gradient
    stays.
    """
    given, ranks = case.given[0], case.ranks
    expected, (steps, backwards) = serial(given), given["inputs"].shape[:2]
    without_decay = partial(torch.optim.AdamW, weight_decay=0.0)
    coupled = partial(torch.optim.Adam, weight_decay=0.01)
    wrong: dict[str, dict[str, Any]] = {
        "the optimizer has its own default of lr, not the lr that is given": {"rate": 1e-3},
        "lr is divided by the number of ranks": {"rate": RATE / ranks},
        "lr is multiplied by the number of ranks": {"rate": RATE * ranks},
        "the update is that of SGD": {"optimizer": torch.optim.SGD},
        "AdamW's weight decay, which is 0.01 by default, is left out": {"optimizer": without_decay},
        "the optimizer is Adam, whose weight decay goes through the moments": {
            "optimizer": coupled
        },
        "zero_grad leaves gradients of the step before": {"forgets": False},
        "only the last backward of a step counts": {"only_last": True},
        "gradients are averaged over the ranks": {"divided_by": ranks},
    }
    if backwards > 1:
        wrong["gradients are averaged over the backwards of a step"] = {
            "divided_by": int(backwards)
        }
    of_gradient = [*wrong][[*wrong].index("only the last backward of a step counts") :]
    own = [serial_of(given, rank, ranks) for rank in range(ranks)]
    for rank, result in enumerate(results):
        sizes = [len(np.array_split(np.empty(size), ranks)[rank]) for size in SIZES]
        expect(
            f"rank {rank}",
            "elements of its slices:",
            result["slices"],
            sizes,
            "those of torch.tensor_split",
        )
        expect(f"rank {rank}", "numbers in the optimizer's state:", result["state"], 2 * sum(sizes))
        expect(
            f"rank {rank}",
            "steps that AdamW has counted:",
            np.unique(result["steps"]),
            [float(steps)],
            how_often(result["steps"], steps),
        )
        if given["stage"] == 2:
            expect(
                f"rank {rank}",
                "most earlier gradients held when one came:",
                result["held"].max(),
                0,
                FREE,
            )
        expect_kept(rank, result["kept"].tolist(), ITEM * sum(sizes))
    if given["counted"]:
        one = (ranks - 1) * sum(SIZES) * ITEM * steps  # of a reduce-scatter, or an all-gather
        sent = int(np.sum([result["bytes"] for result in results]))
        alike = all(np.array_equal(results[0]["parameters"], r["parameters"]) for r in results)
        lacking = "gradients are not reduced" if alike else "parameters are not gathered"
        why = lacking if sent == backwards * one else ""
        twice = "an all-reduce sends twice what a reduce-scatter or an all-gather does"
        why = twice if sent > (backwards + 1) * one else why
        expect("all ranks", "bytes sent:", np.array(sent), (backwards + 1) * one, why)
    for rank, result in enumerate(results):

        def sliced(gradients: Sequence[Tensor], rank: int = rank) -> Array:
            return flat(whole.tensor_split(ranks)[rank] for whole in gradients)

        there = sliced(expected["gradient"]) + float(given["there"])
        story = "reduce adds to the gradient that a slice has: called twice, it would count twice"
        added = {story: there} if given["there"] else {}

        def gradient_by(mistake: dict[str, Any], sliced: Callable[..., Array] = sliced) -> Array:
            return sliced(serial(given, **mistake)["gradient"])

        expect_close(
            rank,
            "the slices' first gradients, one after the other,",
            result["gradient"],
            sliced(expected["gradient"]),
            instead={how: partial(gradient_by, wrong[how]) for how in of_gradient} | added,
            parts=[sliced(gradients) for gradients in own],
            others=[sliced(expected["gradient"], other) for other in range(ranks)],
        )
        expect_gathered(
            rank, given, [each["parameters"] for each in results], expected["parameters"]
        )
        expect_close(
            rank,
            "the parameters after the last step",
            result["parameters"],
            expected["parameters"],
            instead={how: partial(parameters_by, given, mistake) for how, mistake in wrong.items()}
            | {
                "slices are gathered before they are updated, not after": partial(
                    gathered_early, given
                )
            },
        )
        expect_equal(
            rank, "compared with rank 0, parameters", result["parameters"], results[0]["parameters"]
        )


FREE = (
    "the hook sets parameter.grad to None, and keeps nothing of it: zeros, or a later zero_grad, "
    "still hold memory"
)


def how_often(found: Array, steps: int) -> str:
    """Return what to say of AdamW's count of steps."""
    most = found.max() if found.size else steps
    return (
        "a step of ours is one of AdamW"
        if most > steps
        else "AdamW, made anew in a step, forgets its moments"
    )


def serial_of(given: Arrays, rank: int, ranks: int) -> list[Tensor]:
    """Return what one rank has of the first gradient, by parameter, before anything is summed."""
    model = Stack(given)
    for some, wanted in zip(
        torch.tensor(given["inputs"][0]), torch.tensor(given["targets"][0]), strict=True
    ):
        loss_of(model, some, wanted, rank, ranks).backward()
    return [
        parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None
    ]


def expect_gathered(rank: int, given: Arrays, found: Sequence[Array], expected: Array) -> None:
    """Raise `Wrong` if others' slices are as at the start, or if each rank's slice is newer there
    than elsewhere.
    """
    ranks = len(found)
    owner = np.concatenate(
        [
            np.repeat(
                np.arange(ranks), [len(part) for part in np.array_split(np.empty(size), ranks)]
            )
            for size in SIZES
        ]
    )
    if found[rank].shape != expected.shape or np.allclose(found[rank], expected) or ranks == 1:
        return
    foreign = owner != rank
    if np.array_equal(found[rank][foreign], given["parameters"][foreign]):
        raise Wrong(
            f"rank {rank}: in the end the parameters of other ranks' slices are what they were at "
            "the start, expected what their owners have: gather into the model's own parameters, "
            "not into a copy"
        )
    fresh = [
        not np.array_equal(found[one][owner == one], found[other][owner == one])
        for one in range(ranks)
        for other in range(ranks)
        if other != one and (owner == one).any()
    ]
    agree = all(
        np.array_equal(found[one][owner == third], found[other][owner == third])
        for third in range(ranks)
        for one in range(ranks)
        for other in range(ranks)
        if third not in (one, other)
    )
    if all(fresh) and agree:
        raise Wrong(
            f"rank {rank}: in the end each rank has another value of its own slices than all "
            "others have, who agree: this is what comes out if slices are gathered before they "
            "are updated, not after"
        )


def gathered_early(given: Arrays) -> Array:
    """Return the last parameters if the model always has those of the step before, and slices are
    copies.
    """
    model = Stack(given)
    slices = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    steps = torch.optim.AdamW(slices, lr=RATE)
    for inputs, targets in zip(
        torch.tensor(given["inputs"]), torch.tensor(given["targets"]), strict=True
    ):
        model.zero_grad()
        for some, wanted in zip(inputs, targets, strict=True):
            loss_of(model, some, wanted).backward()
        for mine, parameter in zip(slices, model.parameters(), strict=True):
            mine.grad = parameter.grad
            parameter.data = mine.detach().clone()
        steps.step()
    return flat(model.parameters())


def parameters_by(given: Arrays, mistake: dict[str, Any]) -> Array:
    """Return the last parameters that a mistake gives."""
    found: Array = serial(given, **mistake)["parameters"]
    return found


def expect_kept(rank: int, found: list[int], own: int) -> None:
    """Raise `Wrong` if more is held than slices, their gradients and AdamW's state; `own` is one
    set of slices.
    """
    view = "a view keeps the whole of what it is a view of"
    for what, held, most, why in (
        ("the slices", found[0], own, view),
        ("the slices' gradients", found[1], own, view),
        ("AdamW's state", found[2], 2 * own, "it is built over the slices, and nothing else"),
        ("what the answer keeps besides", found[3], own, "whole gradients, or a copy of the model"),
        (
            "in the midst of backward the slices' gradients and the rest",
            found[4],
            own,
            "whole gradients",
        ),
    ):
        if held > most:
            raise Wrong(
                f"rank {rank}: {what} held {held} bytes at some time, expected {most} at most: "
                f"{why}"
            )
