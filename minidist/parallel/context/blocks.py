"""What a rank does with one block of keys and values, wherever it came from, and how partial results become one.

    so far   output, lse   ─┐
                            ├─▶ output + σ(lse' - lse) (output' - output),   log(exp(lse) + exp(lse'))
    block    output', lse' ─┘

Softmax over all keys is a mean of the softmaxes over blocks of keys, each weighted by the sum of its exponentials. Only
the logarithm of that sum is kept, `lse`. Written like this nothing overflows, however large the scores are. Both are
float32 at least: rounded to 16 bits at each merge, they would carry an error that grows with the number of blocks.

In backward, what a block needs of all others is in the *merged* output and lse: exp(score - lse) is its share of the
whole softmax. (Milakov & Gimelshein 2018; Liu, Zaharia & Abbeel 2023, "Ring attention", section 3.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minidist.parallel.context.flash import attend, attend_backward, wide
from minidist.parallel.context.order import Meeting


class Attended(NamedTuple):
    """Queries [B, H, T, d], their output so far [B, H, T, d], and the logarithms of its denominators, lse [B, H, T]."""

    query: Tensor
    output: Tensor
    lse: Tensor

    def of(self, met: Meeting) -> Attended:
        """Return the part that takes part in a meeting: views."""
        return Attended(*(tensor[:, :, met.queries] for tensor in self))


def before_any(query: Tensor) -> Attended:
    """Return the result of queries that have met no keys."""
    output = torch.zeros_like(query, dtype=wide(query), memory_format=torch.contiguous_format)
    return Attended(query, output, torch.full_like(output[..., 0], -torch.inf))


def meet(mine: Attended, block: Tensor, met: Meeting) -> None:
    """Let queries attend to a block of keys and values [2, B, H_kv, T, d], and merge the result into theirs."""
    query, output, lse = mine.of(met)
    key, value = block[..., met.keys, :]
    more, its = attend(query, key, value, met.causal)
    output.lerp_(more, torch.sigmoid(its - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, its))


def meet_backward(
    gradient: Tensor, mine: Attended, block: Tensor, met: Meeting, to_query: Tensor, to_block: Tensor
) -> None:
    """Add the gradients of a meeting: `to_query` [B, H, T, d], and `to_block` [2, B, H_kv, T, d].

    `mine` has the output and lse of *all* meetings, and `gradient` is that of its output.
    """
    query, output, lse = mine.of(met)
    key, value = block[..., met.keys, :]
    found = attend_backward(gradient[:, :, met.queries], query, key, value, output, lse, met.causal)
    for total, term in zip((to_query[:, :, met.queries], *to_block[..., met.keys, :]), found, strict=True):
        total += term
