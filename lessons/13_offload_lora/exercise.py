"""Lesson 13: train little (LoRA), keep the rest in four bits (NF4), and the optimizer's state
somewhere else (offload).

    x ─┬─▶ W, frozen (or four bits) ───────┬─ + ─▶ y        trained, reduced, optimized: A and B only
       └─▶ A [r, in] ─▶ B [out, r] · α/r ──┘

Fill in the functions; their docstrings are the contract. You need torch and
`minidist.full.collectives.all_reduce`. You are building parts of `minidist.full.memory`, `minidist.plan` and
`minidist.full`, so calling anything in them scores nothing.

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
"""NF4: code i stands for the value LEVELS[i]. (Dettmers et al. 2023, QLoRA, appendix E.)"""

Packed: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor]"
"""n quantised weights, as (codes, scales, steps, mean); they form m = ⌈n/64⌉ blocks in g = ⌈m/256⌉
groups.

codes   uint8 [⌈n/2⌉]   two 4-bit codes in each byte, the earlier weight's code in the high four bits; if n is odd, the
                        low four bits of the last byte are 0
scales  int8 [m]        for each block: how many steps its scale lies above the mean (negative: below)
steps   float32 [g]     for each group of 256 blocks: the size of one step
mean    float32 [1]     the mean over all blocks of the largest |weight| of the block
"""


class SlowMemory(Protocol):
    """Where the optimizer state is stored: a CPU's memory or a disk. `fetch` returns a copy. This
    copy takes up fast memory until you give it back with `keep`.
    """

    def fetch(self, number: int) -> dict[str, Tensor]:
        """Return the state of parameter `number`, its place in `parameters`: "step" (the number of
        steps so far, a tensor without dimensions), "exp_avg" and "exp_avg_sq" (both of the
        parameter's shape). Before the first step all are zero.
        """
        ...

    def keep(self, number: int, state: dict[str, Tensor]) -> None:
        """Take back the state of parameter `number`."""
        ...


def adapt(linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> nn.Module:
    """Task 1a: return a module that computes `linear(x)` + alpha/rank · (x Aᵀ) Bᵀ, and trains only
    A and B.

    The module has two parameters of the weight's dtype as attributes: `A` [rank, in] and `B` [out,
    rank]. Draw A from `generator`, from a normal distribution with standard deviation 1/√in. B
    starts at zero, so at the start the module computes what `linear` computes. Freeze the
    parameters of `linear`: its weight, and its bias if it has one. Forward must not form the
    product B A, a matrix of the weight's size: multiply x by A first, then the result by B.
    """
    raise NotImplementedError("task 1 is not started")


def merge(adapted: nn.Module) -> nn.Linear:
    """Task 1b: return one new plain `nn.Linear` that computes the same as `adapted`, a module that
    `adapt` returned.

    The weight of the new layer is W + alpha/rank · B A; its bias is that of the adapted layer. Do
    not change the adapted layer, A or B. The new layer has its own memory: it shares neither weight
    nor bias with the old layer.
    """
    raise NotImplementedError("task 1 is not started")


def reduce_adapters(model: nn.Module, comm: Communicator) -> None:
    """Task 2: after backward, replace the gradient of each trained parameter of `model` by its sum
    over all ranks.

    A frozen parameter has no gradient on any rank (`.grad` is None), and it stays so. Every other
    parameter has a gradient on every rank.

    Messages
    --------
    Put all gradients end to end into one buffer, in the order of `model.parameters()`, and call
    `all_reduce(buffer, comm, algorithm="ring")` once. Send nothing else, and nothing of the frozen
    parameters.
    """
    raise NotImplementedError("task 2 is not started")


def quantize(weights: Tensor) -> Packed:
    """Task 3a: pack float32 weights of any shape into NF4, with double quantisation.

    Flatten the weights and cut them into blocks of 64; the last block may be shorter. Leave
    `weights` as they are: `flatten` may return a view of them. Then:

    1. For each block, find `largest`, its largest |weight|. `mean` is the mean of `largest` over
       all blocks.
    2. Cut the blocks into groups of 256; the last group may be shorter. For each group, step = (the largest value of
       |largest − mean| in the group) / 127.
    3. The scale code of a block is (largest − mean) / step, rounded *up* to a whole number, so that
       no weight is larger than its scale. It lies between −127 and 127. Where the step is 0, the
       scale code is 0.
    4. The scale of a block is scale code · step + mean: this is the scale that `dequantize` will
       use. The code of a weight is the index in LEVELS of the level nearest to weight / scale.
       Where the scale is 0, the code is 7, the level 0.0.

    Returns
    -------
    Packed
        (codes, scales, steps, mean), with the dtypes and shapes that `Packed` describes. `scales`
        are the scale codes.
    """
    raise NotImplementedError("task 3 is not started")


def dequantize(packed: Packed, shape: Sequence[int]) -> Tensor:
    """Task 3b: return the weights that `packed` stands for, as float32 of this shape: each is level
    · scale.

    The level is LEVELS[code of the weight]; the scale is scale code · step + mean, of the weight's
    block. Leave `packed` as it is.
    """
    raise NotImplementedError("task 3 is not started")


def bits_per_weight(count: int) -> float:
    """Task 3c: return how many bits a weight takes on average when `count` weights are packed: 8
    times the bytes of all four tensors of `Packed`, divided by `count`. It is a float; do not round
    it.
    """
    raise NotImplementedError("task 3 is not started")


def offloaded_step(
    parameters: Sequence[nn.Parameter],
    slow: SlowMemory,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Task 4: take one step of AdamW on the parameters that have a gradient, in place, with their
    state in slow memory.

    A parameter w with gradient g has the state (step, m, v), which `slow` stores as "step",
    "exp_avg" and "exp_avg_sq":

        step + 1,   m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
        w ← w − lr · weight_decay · w
        w ← w − lr · (m / (1 − β₁^step)) / (√(v / (1 − β₂^step)) + eps)

    Order
    -----
    Update the parameters in their order. Leave out those without a gradient, and fetch nothing for
    them. Read ahead by one: fetch the next state *before* you update the present parameter, and
    never have more than two states in fast memory. For the parameters a, b, c, d the calls are:
    fetch a, fetch b, keep a, fetch c, keep b, fetch d, keep c, keep d. (At full scale another
    stream or thread calls `fetch` and `keep` while this one computes. Here you call them one after
    the other.)

    Every call fetches each state again, and remembers nothing of it from the call before: between
    two steps, somebody else may have written to slow memory, for example by loading a checkpoint.
    """
    raise NotImplementedError("task 4 is not started")


class InMemory:
    """A slow memory with which you can try task 4."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.states = [
            {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
            for p in parameters
        ]
        self.log: list[str] = []

    def fetch(self, number: int) -> dict[str, Tensor]:
        """Return a copy of the state."""
        self.log.append(f"fetch {number}")
        return {name: value.detach().clone() for name, value in self.states[number].items()}

    def keep(self, number: int, state: dict[str, Tensor]) -> None:
        """Take the state back."""
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
        return (
            f"{packed[0].tolist()} is read as {found}; a million weights take "
            f"{bits_per_weight(10**6):.3f} bits each"
        )

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
