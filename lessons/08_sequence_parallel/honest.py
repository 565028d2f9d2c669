"""Lesson 08, an honest answer: sequence parallelism by hand, from the handout alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist
from minidist import Communicator
from minidist.full.collectives import all_gather, all_reduce, reduce_scatter

# ---------------------------------------------------------------- given


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Divide by the root mean square of the channels, and scale each channel."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


# ---------------------------------------------------------------- task 1: the two borders


def join(x: Tensor, comm: Communicator) -> Tensor:
    """All-gather along the tokens: [B, T/P, D] to [B, T, D]."""
    tokens_first = x.movedim(1, 0).contiguous()
    return (
        all_gather(tokens_first, comm, counts=[len(tokens_first)] * comm.size)
        .movedim(0, 1)
        .contiguous()
    )


def sum_and_cut(x: Tensor, comm: Communicator) -> Tensor:
    """Reduce-scatter along the tokens: [B, T, D] to [B, T/P, D]."""
    return reduce_scatter(x.movedim(1, 0).contiguous(), comm).movedim(0, 1).contiguous()


class Gather(torch.autograd.Function):
    """All-gather, whose backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Return all tokens."""
        ctx.comm = comm
        return join(x, comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all ranks' gradients for this rank's tokens."""
        return sum_and_cut(gradient, ctx.comm), None


class Scatter(torch.autograd.Function):
    """Reduce-scatter, whose backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Return the sum of all ranks' terms for this rank's tokens."""
        ctx.comm = comm
        return sum_and_cut(x, comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all tokens."""
        return join(gradient, ctx.comm), None


def gather_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1: return all ranks' tokens [B, T, D]; of them this rank brings `x` [B, T/P, D]."""
    result: Tensor = Gather.apply(x, comm)
    return result


def scatter_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1: return this rank's tokens [B, T/P, D] of the sum of all ranks' `x` [B, T, D]."""
    result: Tensor = Scatter.apply(x, comm)
    return result


# ---------------------------------------------------------------- task 2: a block


def sequence_block(x: Tensor, mine: Mapping[str, Tensor], comm: Communicator) -> Tensor:
    """Task 2: return this rank's tokens of  x + down(gelu(up(norm(x))))."""
    every = gather_tokens(rms_norm(x, mine["norm.weight"]), comm)  # [B, T, D]
    hidden = F.gelu(F.linear(every, mine["up.weight"], mine["up.bias"]))  # [B, T, C/P]
    # [B, T/P, D]
    return x + scatter_tokens(F.linear(hidden, mine["down.weight"]), comm) + mine["down.bias"]


# ---------------------------------------------------------------- task 3: gradients that are only a part


def sum_partial_gradients(gradients: Mapping[str, Tensor], comm: Communicator) -> None:
    """Task 3: replace gradients of which every rank has some terms by their sums, in place."""
    partial = [gradients["norm.weight"], gradients["down.bias"]]
    together = torch.cat([gradient.flatten() for gradient in partial])
    all_reduce(together, comm)
    for gradient, total in zip(
        partial, together.split([gradient.numel() for gradient in partial]), strict=True
    ):
        gradient.copy_(total.view_as(gradient))


# ---------------------------------------------------------------- try it


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def own(x: Tensor, dim: int) -> Tensor:
        return x.chunk(comm.size, dim)[comm.rank].contiguous()

    x = draw(1, 2 * comm.size, 4)

    def task_1() -> str:
        every = gather_tokens(own(x, 1), comm)
        back = scatter_tokens(every, comm)
        same, sums = torch.equal(every, x), torch.allclose(back, comm.size * own(x, 1))
        return f"gathered equals x: {same}; scattered equals P x: {sums}"

    def task_2() -> str:
        up, down, bias = draw(4 * comm.size, 4), draw(4, 4 * comm.size), draw(4)
        expected = x + F.linear(F.gelu(F.linear(rms_norm(x, torch.ones(4)), up)), down, bias)
        mine = {
            "norm.weight": torch.ones(4).double(),
            "up.weight": own(up, 0),
            "up.bias": torch.zeros(4).double(),
        }
        mine |= {"down.weight": own(down, 1), "down.bias": bias}
        found = sequence_block(own(x, 1), mine, comm)
        return (
            "the block differs from the whole one by "
            f"{float((found - own(expected, 1)).abs().max()):.0e}"
        )

    def task_3() -> str:
        names = ("norm.weight", "up.weight", "up.bias", "down.weight", "down.bias")
        gradients = {name: torch.ones(1) for name in names}
        sum_partial_gradients(gradients, comm)
        return (
            f"ones have become { ({name: int(gradient) for name, gradient in gradients.items()}) }"
        )

    for number, task in enumerate((task_1, task_2, task_3), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
