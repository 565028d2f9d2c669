"""Lesson 08: split the tokens of a sequence over the ranks.

    x [B, T/P, D] ─ norm ─▶ all-gather ─▶ column-parallel, gelu, row-parallel ─▶ reduce-scatter ─▶ + ─▶ [B, T/P, D]

Rank r has the tokens r T/P to (r + 1) T/P; P always divides T. Fill in the functions; their
docstrings are the contract. You need the following from the package. All collectives work along the
*first* axis, on contiguous tensors:

    comm.rank, comm.size
    all_reduce(tensor, comm)                      the sum over all ranks, in place
    all_gather(shard, comm, counts=[n] * P)       returns the shards of all ranks, n rows each, one after the other
    reduce_scatter(full, comm)                    returns this rank's rows of the sum over all ranks

For another axis, move this axis to the front with `x.movedim(dim, 0).contiguous()`, and back
afterwards. On one rank the collectives send nothing, so you need no special case. You are building
what `minidist.full` does, so calling it scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 08             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist
from minidist import Communicator
from minidist.full.collectives import all_gather, all_reduce, reduce_scatter  # noqa: F401  # for your answers

# ---------------------------------------------------------------- given


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Divide by the root mean square of the channels, and scale each channel."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


# ---------------------------------------------------------------- task 1: the two borders


def gather_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1: return the tokens of all ranks [B, T, D]; `x` [B, T/P, D] are this rank's tokens.

    After this, every rank computes something different with all tokens. So on each rank, backward
    gets one term of their gradient [B, T, D], and returns this rank's tokens [B, T/P, D] of the sum
    of all terms. Write a `torch.autograd.Function`.

    Messages: one all-gather in forward, one reduce-scatter in backward.
    """
    raise NotImplementedError("task 1 is not started")


def scatter_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1: return this rank's tokens [B, T/P, D] of the sum of all ranks' `x` [B, T, D].

    Backward gets the gradient of these tokens, and returns the gradient of all tokens [B, T, D].

    Messages: one reduce-scatter in forward, one all-gather in backward.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: a block


def sequence_block(x: Tensor, mine: Mapping[str, Tensor], comm: Communicator) -> Tensor:
    """Task 2: return this rank's tokens of x + down(gelu(up(norm(x)))), with torch's exact gelu,
    `F.gelu(...)`.

    Parameters
    ----------
    x : Tensor
        [B, T/P, D]: this rank's tokens.
    mine
        `norm.weight` [D] and `down.bias` [D], whole; and this rank's slices of the C channels:
        `up.weight` [C/P, D], `up.bias` [C/P], `down.weight` [D, C/P].

    Use `rms_norm`. After backward, the gradients of `norm.weight` and `down.bias` have only the
    terms of this rank's tokens; task 3 sums them.

    Messages: one all-gather and one reduce-scatter of B T D numbers in forward, and the same in
    backward.

    Held for backward: one tensor [B, T, D] with all tokens, the gathered input of `up`. All other
    tensors of width D that autograd keeps have T/P tokens.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: gradients that are only a part


def sum_partial_gradients(gradients: Mapping[str, Tensor], comm: Communicator) -> None:
    """Task 3: after backward of task 2, replace each incomplete gradient by its sum over the ranks,
    in place.

    Parameters
    ----------
    gradients
        The gradients of all parameters of task 2, by their names. A gradient is incomplete if it is
        a sum over tokens and this rank has added only its own tokens. You have to find out which
        ones are. The others are complete: do not change them.

    Messages: one all-reduce for all incomplete gradients together (`torch.cat`). Write the sums
    into the tensors (`gradient.copy_(...)`): a new tensor in the dictionary would not be the
    gradient of any parameter. Return nothing.
    """
    raise NotImplementedError("task 3 is not started")


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
