"""Lesson 13: what is checked, and for how many points.

Numbers are float64, but for NF4, whose scales are float32 by definition: there every rounding that
lies within its rule is taken for right.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from judges import DECAY, RATE, STEPS, judge_lora, judge_offload, judge_reduce
from judges_nf4 import judge_nf4
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minidist import Communicator
from minidist.course.grader.contract import (
    BY_OPTIMIZERS,
    MEMORY,
    STRATEGIES,
    Arrays,
    Case,
    Check,
    Draw,
    Task,
    untouched,
)

BY_HAND = (*MEMORY, "minidist.plan", *STRATEGIES)
LORA = Task(1, "an adapter", BY_HAND)
REDUCE = Task(2, "only adapters are reduced", BY_HAND)
NF4 = Task(3, "weights in four bits", BY_HAND)
OFFLOAD = Task(4, "an optimizer with its state elsewhere", BY_HAND, imports=BY_OPTIMIZERS)


# ---------------------------------------------------------------- cases


def layers(*sizes: tuple[int, int, int, int]) -> Draw:
    """Draw (ranks, outputs, inputs, rank of the adapter): one layer for all, a batch for each
    rank.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for ranks, outputs, inputs, low in sizes:
            common = {
                "weight": rng.normal(size=(outputs, inputs)),
                "bias": rng.normal(size=outputs),
            }
            common |= {"A": rng.normal(size=(low, inputs)), "B": rng.normal(size=(outputs, low))}
            common |= {"alpha": rng.integers(2, 9) / 2, "seed": rng.integers(1 << 30)}
            given = tuple({**common, "x": rng.normal(size=(3, inputs))} for _ in range(ranks))
            label = (
                f"{outputs} x {inputs}, adapter of rank {low}, on {ranks} rank{'s' * (ranks > 1)}"
            )
            cases.append(
                Case(
                    tuple(
                        {name: np.asarray(value) for name, value in one.items()} for one in given
                    ),
                    label,
                )
            )
        return cases

    return draw


def weights(*shapes: tuple[int, ...], size: float = 1.0) -> Draw:
    """Draw weights to be packed, of blocks with scales far apart, times `size`, and packed ones to
    be read.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for shape in shapes:
            count = int(np.prod(shape))
            blocks, groups = -(-count // 64), -(-count // 64 // 256)
            flat = rng.normal(size=count) * np.repeat(rng.uniform(0.01, 0.05, blocks), 64)[:count]
            flat *= size
            flat[count // 2 : count // 2 + 3] = 0
            codes = rng.integers(0, 256, -(-count // 2)).astype("uint8")
            codes[-1] &= 0xF0 if count % 2 else 0xFF
            steps, scales = (
                rng.uniform(1e-4, 2e-4, groups).astype("float32"),
                rng.integers(-127, 128, blocks),
            )
            packed = {
                "codes": codes,
                "scales": scales.astype("int8"),
                "steps": steps,
                "mean": np.float32([0.04]),
            }
            given = {"weights": flat.reshape(shape).astype("float32"), **packed}
            cases.append(Case((given,), f"weights of shape {shape}"))
        return cases

    return draw


def optimized(*sizes: tuple[int, int]) -> Draw:
    """Draw (ranks, parameters) and their gradients in each step, flat; those of every third are
    frozen.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        return [
            Case(
                tuple(
                    {
                        "start": rng.normal(size=(count, 5)),
                        "gradients": rng.normal(size=(STEPS, count, 5)),
                    }
                    for _ in range(ranks)
                ),
                f"{count} parameters on {ranks} rank{'s' * (ranks > 1)}, {STEPS} steps",
            )
            for ranks, count in sizes
        ]

    return draw


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def layer_of(given: Arrays) -> nn.Linear:
    """Return the layer that is to be adapted."""
    outputs, inputs = given["weight"].shape
    linear = nn.Linear(inputs, outputs, dtype=torch.float64, device="meta").to_empty(device="cpu")
    linear.weight.data.copy_(torch.from_numpy(given["weight"]))
    linear.bias.data.copy_(torch.from_numpy(given["bias"]))
    return linear


def run_lora(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1: look at the new adapter, then give it values, go forward and backward, and
    merge.
    """
    linear, low, alpha = layer_of(given), len(given["A"]), float(given["alpha"])
    adapted = exercise.adapt(linear, low, alpha, torch.Generator().manual_seed(int(given["seed"])))
    x = torch.from_numpy(given["x"].copy()).requires_grad_()
    found = {
        "drawn A": adapted.A.detach().numpy().copy(),
        "drawn B": adapted.B.detach().numpy().copy(),
    }
    found["output at the start"] = adapted(x).detach().numpy()
    with torch.no_grad():
        adapted.A.copy_(torch.from_numpy(given["A"]))
        adapted.B.copy_(torch.from_numpy(given["B"]))
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = adapted(x)
    address = linear.weight.data_ptr()
    found["largest"] = max(
        [tensor.numel() for tensor in saved if tensor.data_ptr() != address], default=0
    )
    y.square().sum().backward()
    found |= {"output": y.detach().numpy(), "gradient of x": x.grad.numpy()}
    found |= {f"gradient of {name}": getattr(adapted, name).grad.numpy() for name in "AB"}
    found["frozen"] = [
        parameter.grad is None and not parameter.requires_grad for parameter in linear.parameters()
    ]
    found["trained"] = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    merged = exercise.merge(adapted)
    found |= {"plain": type(merged) is nn.Linear, "merged weight": merged.weight.detach().numpy()}
    mine = {parameter.data_ptr() for parameter in linear.parameters()}
    found["shared"] = any(parameter.data_ptr() in mine for parameter in merged.parameters())
    found["merged output"] = merged(x).detach().numpy()
    return found | {"weight of the layer after merging": linear.weight.detach().numpy()}


def run_reduce(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 on a model with frozen layers before, between and after the trained ones."""
    frozen = [layer_of(given).requires_grad_(False) for _ in range(3)]
    A, B = (nn.ParameterList([torch.from_numpy(given[name].copy())]) for name in "AB")
    model = nn.ModuleList([frozen[0], A, frozen[1], B, frozen[2]])
    for name, holder in (("A", A), ("B", B)):
        holder[0].grad = torch.from_numpy(given[name] * given["x"].sum())
    exercise.reduce_adapters(model, comm)
    found = {name: holder[0].grad.numpy() for name, holder in (("A", A), ("B", B))}
    return found | {
        "kept": frozen[0].weight.numpy(),
        "none": all(p.grad is None for f in frozen for p in f.parameters()),
    }


def run_nf4(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3."""
    count, shape = given["weights"].size, given["weights"].shape
    weights = torch.from_numpy(given["weights"].copy())
    with untouched(weights=weights):
        packed = exercise.quantize(weights)
    names = ("codes", "scales", "steps", "mean")
    found = {name: tensor.numpy() for name, tensor in zip(names, packed, strict=True)}
    right = {name: torch.from_numpy(given[name].copy()) for name in names}
    with untouched(**right):
        found["read"] = exercise.dequantize(tuple(right.values()), shape).numpy()
    return found | {"bits": [exercise.bits_per_weight(each) for each in (count, 64, 100_000)]}


class Slow:
    """A slow memory that writes down who came: 2n for fetching state n, 2n + 1 for bringing it
    back.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.log: list[int] = []
        self.late: list[int] = []  # fetched when the parameter before it was updated already
        self.parameters, self.thread = parameters, threading.get_ident()
        self.waiting: dict[int, Tensor] = {}  # by number, the parameter when its state was fetched
        zeros = [torch.zeros_like(parameter.detach()) for parameter in parameters]
        self.states = [
            {"step": torch.zeros(()), "exp_avg": zero, "exp_avg_sq": zero} for zero in zeros
        ]

    def fetch(self, number: int) -> dict[str, Tensor]:
        """Return a copy."""
        self.log.append(2 * number)
        updated = [
            n for n, then in self.waiting.items() if not torch.equal(self.parameters[n], then)
        ]
        if updated and threading.get_ident() == self.thread:  # another thread may run behind
            self.late.append(number)
        self.waiting[number] = self.parameters[number].detach().clone()
        return {name: value.detach().clone() for name, value in self.states[number].items()}

    def keep(self, number: int, state: dict[str, Tensor]) -> None:
        """Take a copy back."""
        self.log.append(2 * number + 1)
        self.waiting.pop(number, None)
        self.states[number] = {name: value.detach().clone() for name, value in state.items()}

    def overwrite(self) -> None:
        """Let all mean squares be four times as large, and no step done, as if somebody had loaded
        others.
        """
        for state in self.states:
            state["exp_avg_sq"], state["step"] = 4 * state["exp_avg_sq"], torch.zeros(())


def run_offload(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 for some steps; state is overwritten after the first."""
    parameters = [nn.Parameter(torch.from_numpy(start.copy())) for start in given["start"]]
    slow, until = Slow(parameters), []
    for step, gradients in enumerate(given["gradients"]):
        for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.grad = None if number % 3 == 1 else torch.from_numpy(gradient.copy())
        exercise.offloaded_step(parameters, slow, lr=RATE, weight_decay=DECAY)
        until.append(len(slow.log))
        if step == 0:
            slow.overwrite()
    found = {
        "parameters": [parameter.detach().numpy() for parameter in parameters],
        "log": slow.log,
        "until": until,
        "late": slow.late,
    }
    return found | {
        name: np.array([s[name].numpy() for s in slow.states])
        for name in ("step", "exp_avg", "exp_avg_sq")
    }


# ---------------------------------------------------------------- the checks


CHECKS = [
    Check(
        LORA,
        "forward, backward and merged",
        14,
        layers((1, 6, 5, 2), (2, 6, 64, 4)),
        run_lora,
        judge_lora,
    ),
    Check(
        LORA, "the same under mpirun", 3, layers((2, 8, 20, 3)), run_lora, judge_lora, wire="mpi"
    ),
    Check(REDUCE, "one ring", 14, layers((2, 6, 8, 2), (3, 10, 12, 3)), run_reduce, judge_reduce),
    Check(
        REDUCE,
        "the same under mpirun",
        3,
        layers((2, 9, 7, 2)),
        run_reduce,
        judge_reduce,
        wire="mpi",
    ),
    Check(NF4, "a few blocks", 12, weights((4, 64), (10, 32)), run_nf4, judge_nf4),
    Check(
        NF4,
        "a last block, and a last byte, that are not full",
        6,
        weights((7, 23)),
        run_nf4,
        judge_nf4,
    ),
    Check(NF4, "all are zero", 2, weights((3, 43), size=0.0), run_nf4, judge_nf4),
    Check(NF4, "more than one group", 4, weights((130, 257)), run_nf4, judge_nf4),
    Check(OFFLOAD, "three steps", 14, optimized((1, 3), (1, 7)), run_offload, judge_offload),
    Check(
        OFFLOAD,
        "the same under mpirun",
        3,
        optimized((2, 4)),
        run_offload,
        judge_offload,
        wire="mpi",
    ),
]

# ---- hidden: other cases of the checks above ----


CHECKS += [
    Check(LORA, "other sizes", 7, layers((2, 17, 35, 3)), run_lora, judge_lora, hidden=True),
    Check(
        REDUCE,
        "other sizes",
        6,
        layers((5, 3, 8, 1), (4, 8, 5, 2)),
        run_reduce,
        judge_reduce,
        hidden=True,
    ),
    Check(NF4, "other shapes", 6, weights((5, 211), (1, 40)), run_nf4, judge_nf4, hidden=True),
    Check(
        OFFLOAD,
        "other sizes",
        6,
        optimized((3, 10), (1, 4)),
        run_offload,
        judge_offload,
        hidden=True,
    ),
]
