"""Lesson 08: the tokens of a sequence are spread over the ranks.

    x [B, T/P, D] ─ norm ─▶ all-gather ─▶ column-parallel, gelu, row-parallel ─▶ reduce-scatter ─▶ + ─▶ [B, T/P, D]

Rank r has tokens r T/P to (r + 1) T/P; P always divides T. Fill in the functions; their docstrings are the contract.
What you need of the package, all of it along the *first* axis and for contiguous tensors:

    comm.rank, comm.size
    all_reduce(tensor, comm)                      the sum over all ranks, in place
    all_gather(shard, comm, counts=[n] * P)       returns all ranks' shards of n rows, one after the other
    reduce_scatter(full, comm)                    returns this rank's rows of the sum over all ranks
    all_to_all(full, comm)                        cuts the rows into P chunks, sends chunk j to rank j, and returns the
                                                  chunks that came, by sender
    comm.exchange(outgoing, to, incoming, source) sends one tensor and receives another (task 5)

For another axis use `x.movedim(dim, 0).contiguous()`, and back. On one rank these collectives send nothing, so one rank
is no special case. `minidist.parallel` is what you are building: calling it scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 08             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist
from minidist import Communicator
from minidist.collectives import all_gather, all_reduce, all_to_all, reduce_scatter  # noqa: F401  # for your answers
from minidist.model.gpt import causal_attention

# ---------------------------------------------------------------- given


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Divide by the root mean square of the channels, and scale each channel."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


# ---------------------------------------------------------------- task 1: the two borders


def gather_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1: return all ranks' tokens [B, T, D]; of them this rank brings `x` [B, T/P, D].

    Every rank goes on to compute something else with them. So backward is given one term of their gradient [B, T, D],
    and returns this rank's tokens [B, T/P, D] of the sum of all terms. Write a `torch.autograd.Function`.

    Messages: one all-gather in forward, one reduce-scatter in backward.
    """
    raise NotImplementedError("task 1 is not started")


def scatter_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1: return this rank's tokens [B, T/P, D] of the sum of all ranks' `x` [B, T, D].

    Backward is given the gradient of these tokens, and returns that of all tokens [B, T, D].

    Messages: one reduce-scatter in forward, one all-gather in backward.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: a block


def sequence_block(x: Tensor, mine: Mapping[str, Tensor], comm: Communicator) -> Tensor:
    """Task 2: return this rank's tokens of  x + down(gelu(up(norm(x)))), where gelu is torch's: `F.gelu(...)`, exact.

    Parameters
    ----------
    x : Tensor
        [B, T/P, D]: this rank's tokens.
    mine
        `norm.weight` [D] and `down.bias` [D], whole; of C channels this rank's: `up.weight` [C/P, D], `up.bias` [C/P],
        `down.weight` [D, C/P].

    Norm by `rms_norm`. After backward, the gradients of `norm.weight` and `down.bias` are the terms of this rank's
    tokens, not yet sums: that is task 3.

    Messages: one all-gather and one reduce-scatter of B T D numbers in forward, and the same in backward.

    Held for backward: of what is as wide as D, all T tokens once (the gathered input of `up`), the rest for T/P tokens.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: gradients that are only a part


def sum_partial_gradients(gradients: Mapping[str, Tensor], comm: Communicator) -> None:
    """Task 3: after backward of task 2, replace gradients of which every rank has some terms by their sums, in place.

    Parameters
    ----------
    gradients
        Of all parameters of task 2, by their names. Which of them are sums over tokens of which this rank has seen only
        its own? The others are complete, and stay as they are.

    Messages: one all-reduce, for all of them together (`torch.cat`). Change the tensors (`gradient.copy_(...)`): a new
    tensor in the dictionary is no parameter's gradient.
    """
    raise NotImplementedError("task 3 is not started")


# ---------------------------------------------------------------- tasks 4 and 5: attention over a split sequence


def ulysses_attention(query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
    """Task 4: return this rank's tokens of causal attention over all tokens; each of them may look back to any rank.

    Parameters
    ----------
    query, key, value : Tensor
        [B, H, T/P, d]: this rank's tokens, of all heads.

    Returns
    -------
    Tensor
        [B, H, T/P, d]. Gradients flow back: the adjoint of an all-to-all is the all-to-all that brings everything home.

    First trade: this rank gives away its tokens of all heads but H/P, and gets all tokens of those. Attend with
    `causal_attention` (tensors [B, heads, T, d]), which knows nothing of ranks. Then trade back.

    Raises
    ------
    ValueError
        If P does not divide H; before anything is sent.

    Messages: all-to-alls, of 4 B H T/P d numbers together in forward (query, key and value, then the result), and as
    many in backward.
    """
    raise NotImplementedError("task 4 is not started")


def ring_attention(query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
    """Task 5: the same as task 4, forward only (without gradients), by passing keys and values around a ring.

    In step s = 0, 1, ..., P - 1 this rank has the keys and values of rank (r - s) mod P. Those of later ranks are in
    the future, and count nothing; its own are causal; all of earlier ranks count. The keys of all ranks are never here
    together, nor are the scores to all of them, so the softmax has to grow block by block. For each query keep the
    largest score m so far, the sum z of exp(score - m), and the sum o of exp(score - m) value. Both are sums in units
    of exp(m): correct them when a block brings a larger score. The result is o / z. Scores are query·key/√d.

    Messages: P - 1 steps, in each of which keys and values go to the right neighbour, (r + 1) mod P: `comm.exchange`,
    with two messages a step or one. No collectives.

    Memory: at no time more than six blocks, besides the arguments, however many ranks there are. A block is as large as
    this rank's keys and values together. (The check has d = 16 and two tokens a rank, so scores are small.)
    """
    raise NotImplementedError("task 5 is not started")


# ---------------------------------------------------------------- try it


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def own(x: Tensor, dim: int) -> Tensor:
        return x.chunk(comm.size, dim)[comm.rank].contiguous()

    x, heads = draw(1, 2 * comm.size, 4), [draw(1, comm.size, 2 * comm.size, 2) for _ in range(3)]

    def task_1() -> str:
        every = gather_tokens(own(x, 1), comm)
        back = scatter_tokens(every, comm)
        same, sums = torch.equal(every, x), torch.allclose(back, comm.size * own(x, 1))
        return f"gathered equals x: {same}; scattered equals P x: {sums}"

    def task_2() -> str:
        up, down, bias = draw(4 * comm.size, 4), draw(4, 4 * comm.size), draw(4)
        expected = x + F.linear(F.gelu(F.linear(rms_norm(x, torch.ones(4)), up)), down, bias)
        mine = {"norm.weight": torch.ones(4).double(), "up.weight": own(up, 0), "up.bias": torch.zeros(4).double()}
        mine |= {"down.weight": own(down, 1), "down.bias": bias}
        found = sequence_block(own(x, 1), mine, comm)
        return f"the block differs from the whole one by {float((found - own(expected, 1)).abs().max()):.0e}"

    def task_3() -> str:
        names = ("norm.weight", "up.weight", "up.bias", "down.weight", "down.bias")
        gradients = {name: torch.ones(1) for name in names}
        sum_partial_gradients(gradients, comm)
        return f"ones have become { ({name: int(gradient) for name, gradient in gradients.items()}) }"

    def attention(function: Callable[..., Tensor]) -> str:
        found = function(*(own(one, 2) for one in heads), comm)
        return f"differs from the whole one by {float((found - own(causal_attention(*heads), 2)).abs().max()):.0e}"

    tasks = task_1, task_2, task_3, lambda: attention(ulysses_attention), lambda: attention(ring_attention)
    for number, task in enumerate(tasks, start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
