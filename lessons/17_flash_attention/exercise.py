"""Lesson 17: flash attention: softmax(Q Kᵀ / √d) V, tile by tile, without the matrix of all scores.

    for each tile of queries           S = Q Kᵀ / √d of this tile alone
        for each tile of keys    ──▶   a larger largest score m: shrink z and o
                                       z += Σ exp(S - m),   o += exp(S - m) V
        output = o / z,  lse = m + log z

Fill in the functions; their docstrings are the contract. All tensors are [B, H, T, d]: batch,
heads, tokens, and the size of a head. The key heads are as many as the query heads, but in task 1.
Query i of a *causal* attention sees keys 0 to i, also where there are more keys than queries, or
fewer: i counts from the top left.

You are building `minidist.full.context` and torch's `scaled_dot_product_attention`: calling
them scores nothing. Leave all arguments as they are.

    mpirun -n 2 python exercise.py          try it on real processes
    python -m minidist grade 17             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import minidist
from minidist import Communicator
from minidist.full.collectives import all_reduce  # noqa: F401  # for your answer to task 5

TILE = 128  # a tile has at most so many queries, and at most so many keys

# ---------------------------------------------------------------- task 1: bytes


def matrix_bytes(batch: int, heads: int, queries: int, keys: int, itemsize: int) -> int:
    """Task 1a: return the bytes of the matrix of all weights, softmax(Q Kᵀ / √d), of one layer.

    Each head of each sequence has its own matrix. A number takes `itemsize` bytes.
    """
    raise NotImplementedError("task 1 is not started")


def flash_bytes(
    batch: int, heads: int, kv_heads: int, tokens: int, head_size: int, itemsize: int
) -> int:
    """Task 1b: return the bytes that flash attention holds from forward to backward, of one layer.

    These are Q [B, H, T, d], K and V [B, H_kv, T, d], the output [B, H, T, d], and lse [B, H, T]. A
    number of lse takes 4 bytes, whatever `itemsize` is; a number of the others takes `itemsize`
    bytes. In *grouped-query attention* several query heads share one key head: `kv_heads` is H_kv,
    and divides H.
    """
    raise NotImplementedError("task 1 is not started")


def longest_sequences(
    budget: int, batch: int, heads: int, kv_heads: int, head_size: int, itemsize: int
) -> tuple[int, int]:
    """Task 1c: return the longest T that fits into `budget` bytes without flash attention, and the
    longest T with it.

    Without it, one layer holds from forward to backward Q, K and V (not the output) and the matrix
    of 1a, of T queries and T keys. With it, one layer holds the bytes of 1b. T is a whole number,
    and the bytes of T fit if they are at most the budget. The budget fits at least one token. It
    may be 10**15: do not try one T after the other.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: online softmax


def attend_stream(query: Tensor, blocks: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Task 2: return attention to keys and values that come block by block, and go again. No mask.

    Parameters
    ----------
    query : Tensor
        [B, H, Tq, d].
    blocks : iterator of pairs of Tensor
        Keys and values, each [B, H, n, d]; n differs from block to block. Each block comes once.

    Returns
    -------
    tuple of Tensor
        The output softmax(Q Kᵀ / √d) V [B, H, Tq, d] over the keys of all blocks, and for each
        query the natural logarithm of its denominator, lse = log Σ exp(score) over all keys: [B, H,
        Tq].

    Scores may be as large as 3,000 or as small as -3,000: exp(3,000) overflows and exp(-3,000) is
    0, but output and lse have to be right all the same.

    Memory: when a block comes, you may still hold the one before, and no other. Nothing that you
    hold grows with the number of blocks. Keep for each query the largest score so far, a sum of
    weights, and a sum of weighted values.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: forward


def flash_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Task 3: return output [B, H, Tq, d] and lse [B, H, Tq] of attention, computed tile by tile.

    Parameters
    ----------
    query : Tensor
        [B, H, Tq, d].
    key, value : Tensor
        [B, H, Tk, d]. Tq and Tk may differ; neither has to be a multiple of `TILE`. There is at
        least one key.
    causal : bool
        If True, query i sees keys 0 to i only. If False, it sees all keys.

    Memory: all scores that you hold at a time are those of at most `TILE` queries and `TILE` keys,
    for all heads if you like. Not even a mask has Tq x Tk entries. Besides the arguments you hold
    at most eight tiles [B, H, TILE, TILE] and four tensors of the size of the output. Let each
    operation work on all heads: a loop over them takes too long.

    Products: if causal, compute no tile that lies wholly above the diagonal (every key of it is
    later than every query). The grader counts the floating point operations of matrix products.
    """
    raise NotImplementedError("task 3 is not started")


# ---------------------------------------------------------------- task 4: backward


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Task 4a: return the gradients of query, key and value, given the gradient of the output [B,
    H, Tq, d].

    `output` and `lse` are what forward returned. They may be those of *more keys* than `key` and
    `value` have: of all keys, where `key` and `value` are one block of them. Then the gradients of
    key and value are those of this block, and the gradient of query is the term that comes through
    this block. (So the weights of a tile are exp(S - lse).)

    With P = exp(S - lse), and Δ = rowsum(dO · O), one number for each query:

        dV = Pᵀ dO        dS = P · (dO Vᵀ - Δ) / √d        dQ = dS K        dK = dSᵀ Q

    Memory and products as in task 3, with eight tensors of the size of the query or key, whichever
    is larger. A tile takes five matrix products: S again, and one each for dV, dO Vᵀ, dQ and dK.
    """
    raise NotImplementedError("task 4 is not started")


def flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Task 4b: return the output of `flash_forward`, with a gradient: a `torch.autograd.Function`
    of your own.

    From forward to backward it holds query, key, value, the output and lse, and nothing else. After
    backward it holds nothing. Hint: `ctx.save_for_backward` keeps tensors, and lets them go.
    `backward` returns one value for each argument of `forward`, None for `causal`.
    """
    raise NotImplementedError("task 4 is not started")


# ---------------------------------------------------------------- task 5: keys on several ranks


def attention_over_ranks(
    query: Tensor, key: Tensor, value: Tensor, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """Task 5: return on every rank output and lse over the keys of all ranks. No mask, no
    gradients.

    Parameters
    ----------
    query : Tensor
        [B, H, Tq, d], the same on every rank.
    key, value : Tensor
        [B, H, n, d]: this rank's keys and values. n differs from rank to rank. A rank may have *no*
        keys, n = 0; some rank has at least one.

    Compute the output and lse over this rank's keys, then merge those of all ranks: the output over
    all keys is a mean of the ranks' outputs. A rank's weight is its share of the whole denominator.
    Scores are as large and as small as in task 2.

    Messages: `all_reduce(tensor, comm, op="max")`, and `all_reduce(tensor, comm)`, which sums. Both
    write the result into `tensor`, which is to be contiguous. All buffers of a rank together have
    at most B H Tq (d + 2) numbers, however many keys there are. No other collective.
    """
    raise NotImplementedError("task 5 is not started")


# ---------------------------------------------------------------- try it


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, 300, 8, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    scores = query @ key.mT / 8**0.5
    later = torch.ones(300, 300, dtype=torch.bool).triu(1)
    whole, causal = (
        scores.softmax(-1) @ value,
        scores.masked_fill(later, -torch.inf).softmax(-1) @ value,
    )

    def off(found: Tensor, expected: Tensor) -> str:
        return f"differs from softmax(Q Kᵀ / √d) V by {float((found - expected).abs().max()):.0e}"

    def task_1() -> str:
        matrix, held = matrix_bytes(1, 32, 4096, 4096, 2), flash_bytes(1, 32, 8, 4096, 128, 2)
        return f"4,096 tokens, 32 heads: matrix {matrix:,} bytes, flash {held:,}"

    def task_2() -> str:
        return off(
            attend_stream(query, zip(key.split(70, 2), value.split(70, 2), strict=True))[0], whole
        )

    def task_3() -> str:
        return off(flash_forward(query, key, value, True)[0], causal)

    def task_4() -> str:
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        flash_attention(*leaves, True).sum().backward()
        return (
            "the gradient of the first value of the first head sums up to "
            f"{float(leaves[2].grad[0, 0, 0].sum()):.6f}"
        )

    def task_5() -> str:
        mine = (x.tensor_split(comm.size, 2)[comm.rank] for x in (key, value))
        return off(attention_over_ranks(query, *mine, comm)[0], whole)

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
