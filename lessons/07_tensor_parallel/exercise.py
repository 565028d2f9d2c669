"""Lesson 07: a model whose matrices are cut over the ranks, and whose numbers are those of the whole model.

    x on every rank ──f──▶ column-parallel ──▶ gelu ──▶ row-parallel ──g──▶ z on every rank

All ranks are given the same input; each holds and multiplies its own piece of every matrix. Fill in the functions;
their docstrings are the contract. What you need of the package:

    comm.rank, comm.size
    all_reduce(tensor, comm)              replaces a contiguous tensor, in place, by the sum over all ranks (lesson 02)
    all_reduce(tensor, comm, op="max")    or by the largest
    part(size, rank, ranks)               which of `size` rows, heads or words a rank holds: given below

Send by these collectives only. `minidist.parallel` is what you are building: calling it scores nothing. Where it says
"on every rank", all ranks call the function together.

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
from minidist.collectives import all_reduce  # noqa: F401  # for your answers
from minidist.collectives.fast import cut
from minidist.model.gpt import causal_attention  # task 3 says what it does

# ---------------------------------------------------------------- given


def part(size: int, rank: int, ranks: int) -> range:
    """Return which of `size` a rank holds, as `numpy.array_split` cuts: 10 over 4 ranks are 3, 3, 2 and 2."""
    counts = cut(size, ranks)
    start = sum(counts[:rank])
    return range(start, start + counts[rank])


# ---------------------------------------------------------------- task 1: the two borders


def copy_to(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1, f: enter a region in which every rank computes something else with its copy of `x`.

    Parameters
    ----------
    x : Tensor
        The same on every rank.

    Returns
    -------
    Tensor
        The values of `x`, for autograd to go through: write a `torch.autograd.Function` whose forward is the identity
        (return `x.view_as(x)`), and whose backward returns the sum of all ranks' gradients.

    Messages: none in forward. One all-reduce, of the gradient's size, in backward. (On one rank `all_reduce` sends
    nothing, so that is no special case.)

    A Function is a class with two static methods: `forward(ctx, x, comm)`, in which `ctx.comm = comm` keeps what
    backward needs, and `backward(ctx, gradient)`, which returns one value for each argument of forward after ctx: the
    gradient of x, and None for comm. `Enter.apply(x, comm)` calls it.

    The gradient that backward is given must stay as it is, and need not be contiguous, whereas `all_reduce` works in
    place on what is: reduce a `gradient.clone(memory_format=torch.contiguous_format)`.
    """
    raise NotImplementedError("task 1 is not started")


def reduce_from(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1, g: leave the region. Return the sum of all ranks' `x`; backward hands each rank the gradient as it is.

    Parameters
    ----------
    x : Tensor
        One term of the sum on each rank. It must stay as it is, and need not be contiguous: clone it as in f.

    Messages: one all-reduce of the size of `x` in forward, none in backward. On one rank none at all.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: an MLP


def mlp_slices(whole: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Task 2: return what `rank` of `ranks` holds of the MLP  down(gelu(up(x))).

    Parameters
    ----------
    whole
        `up.weight` [C, D], `up.bias` [C], `down.weight` [D, C], `down.bias` [D]. As in `torch.nn.Linear`, a weight is
        stored [outputs, inputs] and its product is x Wᵀ + b: `F.linear(x, weight, bias)`. None requires a gradient.

    Returns
    -------
    dict
        Tensors of the same names. Channels C are cut as `part(C, rank, ranks)` says, so C need not be a multiple of the
        ranks; `down.bias` stays whole. Each has memory of its own (`.clone()`): a view would keep the whole matrix
        alive, and nothing would be saved. Whoever calls makes parameters of them.

    Nothing is sent.
    """
    raise NotImplementedError("task 2 is not started")


def parallel_mlp(x: Tensor, mine: Mapping[str, Tensor], comm: Communicator) -> Tensor:
    """Task 2: return, on every rank, the whole down(gelu(up(x))): forward and gradients as without ranks.

    Parameters
    ----------
    x : Tensor
        [B, T, D], the same on every rank.
    mine
        What `mlp_slices` returned, each of which requires a gradient by now.

    After backward the gradients of `x` and of `down.bias` are whole on every rank, the others are this rank's slices.
    Use torch's exact gelu, `F.gelu(...)`, and `copy_to` and `reduce_from` of task 1.

    Messages: one all-reduce of B T D numbers in forward, one in backward.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: attention


def attention_slices(whole: Mapping[str, Tensor], heads: int, rank: int, ranks: int) -> dict[str, Tensor]:
    """Task 3: return what `rank` of `ranks` holds of an attention layer: some heads, none of them cut.

    Parameters
    ----------
    whole
        `query`, `key`, `value` [H d, D] and `output` [D, H d], weights as of task 2. Channels h d to (h + 1) d are head
        h's.
    heads : int
        H.

    Returns
    -------
    dict
        Tensors of the same names, with memory of their own: of neighbouring heads, `part(H, rank, ranks)`.

    Raises
    ------
    ValueError
        If H is no multiple of the ranks: then the largest rank would make all others wait.
    """
    raise NotImplementedError("task 3 is not started")


def parallel_attention(x: Tensor, mine: Mapping[str, Tensor], head_dim: int, comm: Communicator) -> Tensor:
    """Task 3: return, on every rank, the whole causal attention of x [B, T, D]: forward and gradients as without ranks.

    Parameters
    ----------
    mine
        What `attention_slices` returned, each of which requires a gradient by now.
    head_dim : int
        d. How many heads are here shows in the shapes.

    Without ranks it is: query, key, value = x Wᵀ, each cut into heads [B, H, T, d]; `causal_attention(query, key,
    value)` [B, H, T, d], which divides by the root of d and masks what comes later; the heads side by side again [B, T,
    H d]; times `output`.

    Messages: one all-reduce of B T D numbers in forward, one in backward (one, although three matrices read `x`).
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
        V, at least P: every rank has a word.

    Backward leaves in `mine.grad` the gradients of this rank's words.

    Messages: one all-reduce of B T D numbers in forward, none in backward.
    """
    raise NotImplementedError("task 4 is not started")


def parallel_cross_entropy(logits: Tensor, targets: Tensor, vocabulary: int, comm: Communicator) -> Tensor:
    """Task 5: return, on every rank, the mean over tokens of -log softmax(all logits)[target].

    Parameters
    ----------
    logits : Tensor
        [N, V/P]: this rank's columns `part(V, comm.rank, comm.size)` of N tokens' logits.
    targets : Tensor
        int64 [N], the same on every rank, each from 0 to V - 1.
    vocabulary : int
        V, at least P: every rank has a word.

    The loss of a token is log Σ exp(logit), over all words, minus its target's logit, which one rank has. Logits may be
    as large as 1000, and exp(1000) is infinite: so subtract from all logits of a token the largest that any rank has of
    it, as a constant (`detach`). No f is needed here: what follows the sum over all ranks is the same on all of them,
    and its gradient goes to each rank's own term as it is. Backward leaves this rank's columns of
    (softmax - one-hot)/N in `logits.grad`.

    Messages: all-reduces of at most 3 N numbers together in forward, none in backward. Nothing as large as the logits
    is ever sent.
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
        return f"the sum of 0, 1, ... is {total.tolist()}, and its gradient, summed by f, {term.grad}"

    def task_2() -> str:
        whole = {"up.weight": draw(10, 8), "up.bias": draw(10), "down.weight": draw(8, 10), "down.bias": draw(8)}
        expected = F.linear(F.gelu(F.linear(x, whole["up.weight"], whole["up.bias"])), *list(whole.values())[2:])
        found = parallel_mlp(x, mlp_slices(whole, comm.rank, comm.size), comm)
        return f"the MLP differs from the whole one by {float((found - expected).abs().max()):.0e}"

    def task_3() -> str:
        heads = 2 * comm.size
        whole = {name: draw(2 * heads, 8) for name in ("query", "key", "value")} | {"output": draw(8, 2 * heads)}
        mine = attention_slices(whole, heads, comm.rank, comm.size)
        query, key, value = (F.linear(x, whole[n]).view(1, 3, -1, 2).transpose(1, 2) for n in ("query", "key", "value"))
        expected = F.linear(causal_attention(query, key, value).transpose(1, 2).flatten(2), whole["output"])
        found = parallel_attention(x, mine, head_dim=2, comm=comm)
        return f"attention differs from the whole one by {float((found - expected).abs().max()):.0e}"

    def task_4() -> str:
        table, tokens = draw(11, 4), torch.tensor([[0, 5, 10]])
        here = part(11, comm.rank, comm.size)
        vectors = parallel_embedding(tokens, table[here.start : here.stop], 11, comm)
        return f"the vectors differ from the table's by {float((vectors - table[tokens]).abs().max()):.0e}"

    def task_5() -> str:
        logits, targets = draw(5, 11), torch.tensor([0, 3, 5, 8, 10])
        here = part(11, comm.rank, comm.size)
        loss = parallel_cross_entropy(logits[:, here.start : here.stop], targets, 11, comm)
        return f"the loss is {float(loss):.6f}, of the whole logits {float(F.cross_entropy(logits, targets)):.6f}"

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
