"""Lesson 07: cut the matrices of a model over the ranks, and compute the same numbers as the whole
model.

    x on every rank ──f──▶ column-parallel ──▶ gelu ──▶ row-parallel ──g──▶ z on every rank

All ranks get the same input; each rank holds its own piece of every matrix and multiplies with it.
Fill in the functions; their docstrings are the contract. You need from the package:

    comm.rank, comm.size
    all_reduce(tensor, comm)              replaces a contiguous tensor, in place, by the sum over all ranks (lesson 02)
    all_reduce(tensor, comm, op="max")    or by the largest
    part(size, rank, ranks)               which of `size` channels, heads or words a rank holds: given below

Send only with these collectives. You are building what `minidist.full` does, so calling it
scores nothing. Where a docstring says "on every rank", all ranks call the function together.
Leave arguments as they are, unless a docstring says that you change them.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 07             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist
from minidist import Communicator
from minidist.full.collectives import all_reduce  # noqa: F401  # for your answers
from minidist.full.collectives.fast import cut
from minidist.full.model.gpt import causal_attention  # task 3 says what it does

# ---------------------------------------------------------------- given


def part(size: int, rank: int, ranks: int) -> range:
    """Return which of `size` indices a rank holds, cut as by `numpy.array_split`: 10 over 4 ranks
    are 3, 3, 2 and 2.
    """
    counts = cut(size, ranks)
    start = sum(counts[:rank])
    return range(start, start + counts[rank])


# ---------------------------------------------------------------- task 1: the two borders


def copy_to(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1, f: enter a region in which every rank computes something different with its copy of
    `x`.

    Parameters
    ----------
    x : Tensor
        The same on every rank.

    Returns
    -------
    Tensor
        The values of `x`, as the output of a `torch.autograd.Function` that you write. Its forward
        is the identity (return `x.view_as(x)`), and its backward returns the sum of all ranks'
        gradients.

    Messages: none in forward. One all-reduce, of the gradient's size, in backward. (On one rank
    `all_reduce` sends nothing, so you need no special case.)

    A Function is a class with two static methods. `forward(ctx, x, comm)` stores what backward
    needs: `ctx.comm = comm`. `backward(ctx, gradient)` returns one value for each argument of
    forward after ctx: the gradient of x, and None for comm. `Enter.apply(x, comm)` calls forward.

    Do not change the gradient that backward gets. It may be not contiguous, but `all_reduce` works
    in place and needs a contiguous tensor: reduce a copy,
    `gradient.clone(memory_format=torch.contiguous_format)`.
    """
    raise NotImplementedError("task 1 is not started")


def reduce_from(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1, g: leave the region. Return the sum of all ranks' `x`; backward gives each rank the
    gradient unchanged.

    Parameters
    ----------
    x : Tensor
        One term of the sum on each rank. Do not change it. It may be not contiguous: clone it as in
        f.

    Messages: one all-reduce of the size of `x` in forward, none in backward. On one rank none at
    all.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: an MLP


def mlp_slices(whole: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Task 2, first half: return the slices of the MLP down(gelu(up(x))) that `rank` of `ranks`
    holds.

    Parameters
    ----------
    whole
        `up.weight` [C, D], `up.bias` [C], `down.weight` [D, C], `down.bias` [D]. As in
        `torch.nn.Linear`, a weight is stored [outputs, inputs] and its product is x Wᵀ + b:
        `F.linear(x, weight, bias)`. None requires a gradient.

    Returns
    -------
    dict
        Tensors of the same names. Cut the C channels as `part(C, rank, ranks)` says; C need not be
        a multiple of the number of ranks. `down.bias` stays whole. Each tensor has its own memory
        (`.clone()`): a view would keep the whole matrix alive, and would save nothing. The caller
        makes parameters of them.

    Send nothing.
    """
    raise NotImplementedError("task 2 is not started")


def parallel_mlp(x: Tensor, mine: Mapping[str, Tensor], comm: Communicator) -> Tensor:
    """Task 2, second half: return, on every rank, the whole down(gelu(up(x))), with the gradients
    of the whole MLP.

    Parameters
    ----------
    x : Tensor
        [B, T, D], the same on every rank.
    mine
        The tensors that `mlp_slices` returned; each of them now requires a gradient.

    After backward, the gradients of `x` and `down.bias` are whole on every rank; the others are
    this rank's slices. Use torch's exact gelu, `F.gelu(...)`, and `copy_to` and `reduce_from` of
    task 1.

    Messages: one all-reduce of B T D numbers in forward, one in backward.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: attention


def attention_slices(
    whole: Mapping[str, Tensor], heads: int, rank: int, ranks: int
) -> dict[str, Tensor]:
    """Task 3, first half: return the slices of an attention layer that `rank` of `ranks` holds:
    some whole heads.

    Parameters
    ----------
    whole
        `query`, `key`, `value` [H d, D] and `output` [D, H d], weights stored as in task 2.
        Channels h d to (h + 1) d belong to head h.
    heads : int
        H.

    Returns
    -------
    dict
        Tensors of the same names, with their own memory, for the heads `part(H, rank, ranks)`.

    Raises
    ------
    ValueError
        If H is not a multiple of `ranks`: all others would wait for the rank with the most heads.
    """
    raise NotImplementedError("task 3 is not started")


def parallel_attention(
    x: Tensor, mine: Mapping[str, Tensor], head_dim: int, comm: Communicator
) -> Tensor:
    """Task 3, second half: return, on every rank, the whole causal attention of x [B, T, D], with
    its gradients.

    Parameters
    ----------
    mine
        The tensors that `attention_slices` returned; each of them now requires a gradient.
    head_dim : int
        d. The shapes of `mine` tell how many heads this rank has.

    Without ranks, the layer computes:

    1. query, key, value = x Wᵀ, each cut into heads [B, H, T, d];
    2. `causal_attention(query, key, value)` [B, H, T, d], which divides by the root of d and masks
       later tokens;
    3. the heads side by side again [B, T, H d], times `output`.

    Messages: one all-reduce of B T D numbers in forward, one in backward (only one, although three
    matrices read `x`).
    """
    raise NotImplementedError("task 3 is not started")


# ---------------------------------------------------------------- tasks 4 and 5: words


def parallel_embedding(tokens: Tensor, mine: Tensor, vocabulary: int, comm: Communicator) -> Tensor:
    """Task 4: return, on every rank, the vectors [B, T, D] of `tokens`.

    Parameters
    ----------
    tokens : Tensor
        int64 [B, T], the same on every rank, each from 0 to V - 1.
    mine : Tensor
        The rows of the words `part(V, comm.rank, comm.size)`: [V/P, D], a parameter.
    vocabulary : int
        V, at least P: every rank has at least one word.

    After backward, `mine.grad` has the gradients of this rank's words.

    Messages: one all-reduce of B T D numbers in forward, none in backward.
    """
    raise NotImplementedError("task 4 is not started")


def parallel_cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: int, comm: Communicator
) -> Tensor:
    """Task 5: return, on every rank, the mean over tokens of -log softmax(all logits)[target].

    Parameters
    ----------
    logits : Tensor
        [N, V/P]: this rank's columns `part(V, comm.rank, comm.size)` of N tokens' logits.
    targets : Tensor
        int64 [N], the same on every rank, each from 0 to V - 1.
    vocabulary : int
        V, at least P: every rank has at least one word.

    The loss of a token is log Σ exp(logit), over all words, minus the logit of its target, which
    one rank has. Logits may be as large as 1000, and exp(1000) is infinite. So, for each token,
    find the largest logit over all ranks, and subtract it from all logits of the token, as a
    constant (`detach`). You need no f here: after the sum over the ranks, all ranks compute the
    same, and the gradient goes to each rank's own term unchanged. After backward, `logits.grad` has
    this rank's columns of (softmax - one-hot)/N.

    Messages: all-reduces of at most 3 N numbers together in forward, none in backward. Never send
    anything as large as the logits.
    """
    raise NotImplementedError("task 5 is not started")


# ---------------------------------------------------------------- try it


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    x = draw(1, 3, 8)

    def task_1() -> str:
        term = torch.full((2,), float(comm.rank), requires_grad=True)
        total = reduce_from(copy_to(term, comm), comm)
        total.sum().backward()
        return (
            f"the sum of 0, 1, ... is {total.tolist()}, and its gradient, summed by f, {term.grad}"
        )

    def task_2() -> str:
        whole = {
            "up.weight": draw(10, 8),
            "up.bias": draw(10),
            "down.weight": draw(8, 10),
            "down.bias": draw(8),
        }
        expected = F.linear(
            F.gelu(F.linear(x, whole["up.weight"], whole["up.bias"])), *list(whole.values())[2:]
        )
        found = parallel_mlp(x, mlp_slices(whole, comm.rank, comm.size), comm)
        return f"the MLP differs from the whole one by {float((found - expected).abs().max()):.0e}"

    def task_3() -> str:
        heads = 2 * comm.size
        whole = {name: draw(2 * heads, 8) for name in ("query", "key", "value")} | {
            "output": draw(8, 2 * heads)
        }
        mine = attention_slices(whole, heads, comm.rank, comm.size)
        query, key, value = (
            F.linear(x, whole[n]).view(1, 3, -1, 2).transpose(1, 2)
            for n in ("query", "key", "value")
        )
        expected = F.linear(
            causal_attention(query, key, value).transpose(1, 2).flatten(2), whole["output"]
        )
        found = parallel_attention(x, mine, head_dim=2, comm=comm)
        return (
            f"attention differs from the whole one by {float((found - expected).abs().max()):.0e}"
        )

    def task_4() -> str:
        table, tokens = draw(11, 4), torch.tensor([[0, 5, 10]])
        here = part(11, comm.rank, comm.size)
        vectors = parallel_embedding(tokens, table[here.start : here.stop], 11, comm)
        return (
            "the vectors differ from the table's by "
            f"{float((vectors - table[tokens]).abs().max()):.0e}"
        )

    def task_5() -> str:
        logits, targets = draw(5, 11), torch.tensor([0, 3, 5, 8, 10])
        here = part(11, comm.rank, comm.size)
        loss = parallel_cross_entropy(logits[:, here.start : here.stop], targets, 11, comm)
        return (
            f"the loss is {float(loss):.6f}, of the whole logits "
            f"{float(F.cross_entropy(logits, targets)):.6f}"
        )

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
