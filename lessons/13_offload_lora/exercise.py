"""Lesson 13: train little (LoRA), keep the rest in four bits (NF4), and the optimizer's state somewhere else (offload).

    x ─┬─▶ W, frozen (or four bits) ───────┬─ + ─▶ y        trained, reduced, optimized: A and B only
       └─▶ A [r, in] ─▶ B [out, r] · α/r ──┘

Fill in the functions; their docstrings are the contract. You need torch, and `minidist.collectives.all_reduce`.
`minidist.memory` and `minidist.parallel` are what you are building: calling them scores nothing.

    mpirun -n 2 python exercise.py          try it on real processes
    python -m minidist grade 13             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NF4: level i is what code i stands for. (Dettmers et al. 2023, QLoRA, appendix E.)"""

Packed: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor]"
"""Codes, scales, steps and mean of n weights; m = ⌈n/64⌉ blocks in g = ⌈m/256⌉ groups.

codes   uint8 [⌈n/2⌉]   two codes in each, the earlier weight's in the high four bits; where n is odd, the last is 0
scales  int8 [m]        of each block, how many steps its scale lies above the mean, or below
steps   float32 [g]     of each group of 256 blocks
mean    float32 [1]     the mean of all blocks' largest |weight|
"""


class SlowMemory(Protocol):
    """Where the optimizer's state lives: a CPU's memory, a disk. What is fetched is a copy, and takes up fast memory
    until it is brought back."""

    def fetch(self, number: int) -> dict[str, Tensor]:
        """Return the state of parameter `number`: "step" (how many there were, no dimension), "exp_avg" and
        "exp_avg_sq", both of the parameter's shape. Before the first step all are zero."""
        ...

    def keep(self, number: int, state: dict[str, Tensor]) -> None:
        """Take back the state of parameter `number`."""
        ...


def adapt(linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> nn.Module:
    """Task 1a: return a module that computes `linear(x)` + alpha/rank · (x Aᵀ) Bᵀ, and trains A and B alone.

    Its attributes `A` [rank, in] and `B` [out, rank] are parameters of the weight's dtype. A is drawn from `generator`,
    normal with deviation 1/√in; B is zero, so at the start the module computes what `linear` does. `linear` (its bias
    too) is frozen. Forward makes no matrix of the weight's size: it multiplies by A, then by B.
    """
    raise NotImplementedError("task 1 is not started")


def merge(adapted: nn.Module) -> nn.Linear:
    """Task 1b: return one plain `nn.Linear` that computes the same as what `adapt` returned.

    Its weight is W + alpha/rank · B A. The layer that was adapted stays as it is, and so do A and B. The
    new layer has numbers of its own: it shares neither weight nor bias with the old one.
    """
    raise NotImplementedError("task 1 is not started")


def reduce_adapters(model: nn.Module, comm: Communicator) -> None:
    """Task 2: after backward, replace each gradient of `model` by its sum over all ranks.

    What is frozen has no gradient, on any rank; all else has one on every rank.

    Messages
    --------
    Those of a single `all_reduce(buffer, comm, algorithm="ring")`, of a buffer in which all gradients lie end to end,
    in the order of `model.parameters()`. Nothing of the frozen parameters is sent.
    """
    raise NotImplementedError("task 2 is not started")


def quantize(weights: Tensor) -> Packed:
    """Task 3a: pack float32 weights of any shape into NF4, with double quantisation.

    In blocks of 64 of the flattened weights, the last of which may be shorter:

    1. The largest |weight| of each block; the mean of these.
    2. In groups of 256 blocks: step = the largest |largest − mean| of the group / 127.
    3. A block's scale code is (largest − mean) / step, rounded *up* to a whole number (so that no weight is larger than
       its scale), from −127 to 127; 0 where the step is 0.
    4. The scale, as it will be read, is scale code · step + mean. A weight's code is that of the level nearest to
       weight / scale; 7 (zero) where the scale is 0.
    """
    raise NotImplementedError("task 3 is not started")


def dequantize(packed: Packed, shape: Sequence[int]) -> Tensor:
    """Task 3b: return the float32 weights that were packed, rounded: level · scale, in their shape."""
    raise NotImplementedError("task 3 is not started")


def bits_per_weight(count: int) -> float:
    """Task 3c: return how many bits one of `count` weights takes on the average, with all that belongs to them."""
    raise NotImplementedError("task 3 is not started")


def offloaded_step(
    parameters: Sequence[nn.Parameter],
    slow: SlowMemory,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Task 4: do a step of AdamW on the parameters that have a gradient, in place, with their state in slow memory.

    For a parameter w with gradient g, of which the state is (step, m, v):

        step + 1,   m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
        w ← w − lr · weight_decay · w
        w ← w − lr · (m / (1 − β₁^step)) / (√(v / (1 − β₂^step)) + eps)

    Order
    -----
    Parameters come in their order; those without gradient are left out, and nothing is fetched for them. Read ahead by
    one: the next state is fetched *before* the update that it would otherwise wait for, and never are more than two
    states in fast memory: fetch a, fetch b, keep a, fetch c, keep b, fetch d, keep c, keep d. (At full scale another
    stream or thread fetches and keeps, while this one computes. Here one after the other will do.)

    Nothing of the state is remembered from one call to the next: between two steps somebody else may have written to
    slow memory, a checkpoint that is loaded, for one.
    """
    raise NotImplementedError("task 4 is not started")


class InMemory:
    """A slow memory to try task 4 with."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.states = [
            {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            for p in parameters
        ]
        self.log: list[str] = []

    def fetch(self, number: int) -> dict[str, Tensor]:
        """Return a copy."""
        self.log.append(f"fetch {number}")
        return {name: value.detach().clone() for name, value in self.states[number].items()}

    def keep(self, number: int, state: dict[str, Tensor]) -> None:
        """Take it back."""
        self.log.append(f"keep {number}")
        self.states[number] = {name: value.detach().clone() for name, value in state.items()}


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()

    def small(outputs: int, inputs: int) -> nn.Linear:
        linear = nn.Linear(inputs, outputs, bias=False, device="meta").to_empty(device="cpu")
        linear.weight.data.copy_(torch.arange(1.0, outputs * inputs + 1).view(outputs, inputs))
        return linear

    def task_1() -> str:
        adapted = adapt(small(2, 3), 1, 2.0, torch.Generator().manual_seed(0))
        names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
        return f"trained are {names}, and merged is {merge(adapted).weight.tolist()}"

    def task_2() -> str:
        frozen, trained = small(2, 3).requires_grad_(False), small(2, 2)
        trained.weight.grad = torch.full((2, 2), float(comm.rank + 1))
        reduce_adapters(nn.Sequential(frozen, trained), comm)
        return f"the gradient is {trained.weight.grad.tolist()}"

    def task_3() -> str:
        packed = quantize(torch.linspace(-1, 2, 6))
        found = [round(value, 3) for value in dequantize(packed, (6,)).tolist()]
        return f"{packed[0].tolist()} is read as {found}; a million weights take {bits_per_weight(10**6):.3f} bits each"

    def task_4() -> str:
        parameters = [nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        slow = InMemory(parameters)
        offloaded_step(parameters, slow, lr=0.1)
        return f"{', '.join(slow.log)}; the last parameter is {parameters[2].tolist()}"

    for number, task in enumerate((task_1, task_2, task_3, task_4), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
