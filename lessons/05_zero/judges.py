"""Lesson 05, tasks 2 and 3: the program that runs beside an answer, and the serial run that
`judges_sharded.py` holds it against."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import chain
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from minidist import Communicator
from minidist.course.grader.contract import (
    Arrays,
    Wrong,
)
from minidist.full.comm.wire import Wire

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
    """Return tensors one after the other; for one that is missing, what is not a number. A part of
    a gradient counts as what it is, this rank's elements.
    """
    missing = torch.full((1,), torch.nan)
    rows = [missing if t is None else t.detach().as_subclass(Tensor).flatten() for t in tensors]
    return torch.cat(rows).numpy()


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
    results, before = dict[str, Any](), comm.traffic.bytes
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
        "bytes": comm.traffic.bytes - before,
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
        if id(each) in seen or foreign or isinstance(each, ModuleType | Communicator | Wire):
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
