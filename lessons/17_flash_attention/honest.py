"""Lesson 17 answered by hand, from the handout alone: bytes, the online softmax, tiles, and a merge
over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt, sqrt
from typing import Any

import torch
from torch import Tensor

from minidist import Communicator
from minidist.full.collectives import all_reduce

TILE = 128


def matrix_bytes(batch: int, heads: int, queries: int, keys: int, itemsize: int) -> int:
    """Task 1a: a number for each query and key."""
    return batch * heads * queries * keys * itemsize


def flash_bytes(
    batch: int, heads: int, kv_heads: int, tokens: int, head_size: int, itemsize: int
) -> int:
    """Task 1b: Q, O, K, V and lse."""
    q = batch * heads * tokens * head_size * itemsize
    k = batch * kv_heads * tokens * head_size * itemsize
    return q + k + k + q + batch * heads * tokens * 4


def longest_sequences(
    budget: int, batch: int, heads: int, kv_heads: int, head_size: int, itemsize: int
) -> tuple[int, int]:
    """Task 1c: a T² + b T <= budget, solved; and bytes that grow with T."""
    a = batch * heads * itemsize
    b = batch * (heads + 2 * kv_heads) * head_size * itemsize
    plain = (isqrt(b * b + 4 * a * budget) - b) // (2 * a)
    return plain, budget // flash_bytes(batch, heads, kv_heads, 1, head_size, itemsize)


class Online:
    """The softmax of some queries over the keys that have come so far."""

    def __init__(self, query: Tensor) -> None:
        self.query = query / sqrt(query.shape[-1])
        self.m = query.new_full(query.shape[:-1], -torch.inf)
        self.z = torch.zeros_like(self.m)
        self.o = torch.zeros_like(query)

    def add(self, key: Tensor, value: Tensor, hidden: Tensor | None = None) -> None:
        """Take in more keys; `hidden` ones count nothing."""
        s = self.query @ key.transpose(-1, -2)
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        m = torch.maximum(self.m, s.max(-1).values)
        factor = torch.exp(self.m - m)
        p = torch.exp(s - m[..., None])
        self.z = self.z * factor + p.sum(-1)
        self.o = self.o * factor[..., None] + p @ value
        self.m = m

    def result(self) -> tuple[Tensor, Tensor]:
        """Return output and lse."""
        return self.o / self.z[..., None], self.m + self.z.log()


def attend_stream(query: Tensor, blocks: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Task 2: take in one block after the other."""
    state = Online(query)
    for key, value in blocks:
        state.add(key, value)
    return state.result()


def hidden_in(i: int, j: int, rows: int, columns: int) -> Tensor:
    """Return which keys from j on are later than the queries from i on."""
    return torch.arange(j, j + columns) > torch.arange(i, i + rows)[:, None]


def flash_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Task 3: for each tile of queries, all tiles of keys that it sees."""
    outputs, lses = [], []
    for i in range(0, query.shape[2], TILE):
        state = Online(query[:, :, i : i + TILE])
        rows = state.query.shape[2]
        for j in range(0, key.shape[2], TILE):
            k, v = key[:, :, j : j + TILE], value[:, :, j : j + TILE]
            if causal and j >= i + rows:
                break
            state.add(k, v, hidden_in(i, j, rows, k.shape[2]) if causal else None)
        output, lse = state.result()
        outputs.append(output)
        lses.append(lse)
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Task 4a: the outer loop over keys, as in the paper."""
    delta = (gradient * output).sum(-1)
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    scale = 1 / sqrt(query.shape[-1])
    for j in range(0, key.shape[2], TILE):
        k, v = key[:, :, j : j + TILE], value[:, :, j : j + TILE]
        for i in range(0, query.shape[2], TILE):
            q, do = query[:, :, i : i + TILE], gradient[:, :, i : i + TILE]
            if causal and j >= i + q.shape[2]:
                continue
            s = q @ k.transpose(-1, -2) * scale
            if causal:
                s = s.masked_fill(hidden_in(i, j, q.shape[2], k.shape[2]), -torch.inf)
            p = torch.exp(s - lse[:, :, i : i + TILE, None])
            ds = p * (do @ v.transpose(-1, -2) - delta[:, :, i : i + TILE, None]) * scale
            dv[:, :, j : j + TILE] += p.transpose(-1, -2) @ do
            dk[:, :, j : j + TILE] += ds.transpose(-1, -2) @ q
            dq[:, :, i : i + TILE] += ds @ k
    return dq, dk, dv


class Flash(torch.autograd.Function):
    """Forward by tiles, and backward by tiles."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """Save what backward needs."""
        output, lse = flash_forward(query, key, value, causal)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.causal = causal
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients."""
        return (*flash_backward(gradient, *ctx.saved_tensors, ctx.causal), None)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Task 4b: the function of autograd."""
    return Flash.apply(query, key, value, causal)


def attention_over_ranks(
    query: Tensor, key: Tensor, value: Tensor, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """Task 5: numerators and denominators of all ranks, in units of the largest denominator."""
    if key.shape[2]:
        output, lse = flash_forward(query, key, value, False)
    else:
        output, lse = torch.zeros_like(query), query.new_full(query.shape[:-1], -torch.inf)
    largest = lse.clone()
    all_reduce(largest, comm, op="max")
    z = torch.exp(lse - largest)
    o = output * z[..., None]
    all_reduce(z, comm)
    all_reduce(o, comm)
    return o / z[..., None], largest + z.log()
