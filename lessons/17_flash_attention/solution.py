"""Lesson 17, solved: the package's own page. Read it in `minidist/full/context/flash.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minidist import Communicator
from minidist.full.collectives import all_reduce
from minidist.full.context import flash
from minidist.full.context.blocks import before_any, meet
from minidist.full.context.flash import attend, page_backward, page_forward
from minidist.full.context.order import Meeting


def matrix_bytes(batch: int, heads: int, queries: int, keys: int, itemsize: int) -> int:
    """Count a weight for each pair of a query and a key."""
    return batch * heads * queries * keys * itemsize


def flash_bytes(
    batch: int, heads: int, kv_heads: int, tokens: int, head_size: int, itemsize: int
) -> int:
    """Count query and output, key and value, and lse in float32."""
    return batch * tokens * (2 * (heads + kv_heads) * head_size * itemsize + 4 * heads)


def longest_sequences(
    budget: int, batch: int, heads: int, kv_heads: int, head_size: int, itemsize: int
) -> tuple[int, int]:
    """Solve a quadratic equation by halves, and a linear one."""

    def plain_bytes(tokens: int) -> int:
        linear = batch * tokens * (heads + 2 * kv_heads) * head_size * itemsize
        return linear + matrix_bytes(batch, heads, tokens, tokens, itemsize)

    fits, too_long = 0, budget
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if plain_bytes(middle) <= budget else (fits, middle)
    return fits, budget // flash_bytes(batch, heads, kv_heads, 1, head_size, itemsize)


def attend_stream(query: Tensor, blocks: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Meet one block after the other, as a rank of ring attention does."""
    mine = before_any(query)
    for key, value in blocks:
        meet(mine, torch.stack((key, value)), Meeting(causal=False))
    return mine.output, mine.lse


def flash_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute the page."""
    return page_forward(query, key, value, causal)


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the page, backward."""
    return page_backward(gradient, query, key, value, (gradient * output).sum(-1), lse, causal)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Call the package's function of autograd."""
    return flash.flash_attention(query, key, value, causal)[0]


def attention_over_ranks(
    query: Tensor, key: Tensor, value: Tensor, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """Sum the ranks' outputs and denominators, both relative to the largest denominator."""
    output, lse = attend(query, key, value, causal=False)
    largest = lse.clone().contiguous()
    all_reduce(largest, comm, op="max")
    share = (lse - largest).exp().unsqueeze(-1)
    sums = torch.cat((share * output, share), -1)  # [B, H, Tq, d + 1]
    all_reduce(sums, comm)
    return sums[..., :-1] / sums[..., -1:], largest + sums[..., -1].log()
