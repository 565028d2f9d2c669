"""Context parallelism: a sequence is cut among ranks, and keys and values go round a ring.

    rank r has the queries of its tokens, and at first its own keys and values. P times:
        attend to the block at hand, if it is not later than the own tokens
        merge the result
        hand the block to rank r + 1, and take that of rank r - 1

    backward goes round once more. With each block travel its gradients, to which every rank adds
    its terms; one hop after the last rank they are at home.

Softmax over all keys is a mean of the softmaxes over blocks of keys, each weighted by its sum of
exponentials. Only the logarithm of that sum is kept, `lse`:

    so far   output, lse   ─┐
                            ├─▶ output + σ(lse' - lse) (output' - output),   log(exp(lse) + exp(lse'))
    block    output', lse' ─┘

Written like this nothing overflows. In backward, a block's share of the whole softmax is
exp(score - lse) with the lse of *all* blocks: backward needs the merged output and lse.

Cost: forward passes P - 1 blocks on, 2 B T/P D_kv numbers each; backward twice as much, and one hop
more. No rank holds more than its own tokens and two blocks. Rank P - 1 computes most, since causal
attention gives later tokens more to do; `full/context` has an order of tokens that evens it out.
(Liu, Zaharia & Abbeel 2023, "Ring attention", algorithm 1; Milakov & Gimelshein 2018 for `lse`.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm import Communicator
from minidist.model import Attention


def context_parallel(model: nn.Module, comm: Communicator) -> None:
    """Have all attention of a model go round the ring: every rank has T/P tokens, in order."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = lambda query, key, value: ring_attention(query, key, value, comm)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
    """Return causal attention [B, H, T/P, d] of this rank's queries to the keys of all ranks."""
    result: Tensor = RingAttention.apply(query, key, value, comm)  # type: ignore[no-untyped-call]
    return result


class RingAttention(torch.autograd.Function):
    """Attends to one block after the other, and goes round again in backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
        """Save query, key, value, output and lse of this rank."""
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros_like(query, dtype=wide)
        lse = torch.full_like(output[..., 0], -torch.inf)  # [B, H, T/P]
        block = torch.stack((key, value))
        for hop in range(comm.size):
            source = (comm.rank - hop) % comm.size
            if source <= comm.rank:
                more, its_lse = attend(query, block, causal=source == comm.rank)
                output.lerp_(more, torch.sigmoid(its_lse - lse).unsqueeze(-1))
                lse = torch.logaddexp(lse, its_lse)
            if hop + 1 < comm.size:
                block = pass_on(block, comm)
        ctx.comm, ctx.wide = comm, wide
        ctx.save_for_backward(query, key, value, output, lse)
        return output.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of query, key and value."""
        query, key, value, output, lse = ctx.saved_tensors
        comm, gradient = ctx.comm, gradient.to(ctx.wide)
        delta = (gradient * output).sum(-1)  # [B, H, T/P]
        block = torch.stack((key, value))
        to_query = torch.zeros_like(query, dtype=ctx.wide)
        to_block = torch.zeros_like(block, dtype=ctx.wide)
        for hop in range(comm.size):
            source = (comm.rank - hop) % comm.size
            if source <= comm.rank:
                causal = source == comm.rank
                terms = attend_backward(gradient, query, block, lse, delta, causal)
                to_query += terms[0]
                to_block += terms[1]
            if hop + 1 < comm.size:
                block = pass_on(block, comm)
            to_block = pass_on(to_block, comm)  # after the last hop, too: it brings them home
        to_key, to_value = to_block.to(key.dtype)
        return to_query.to(query.dtype), to_key, to_value, None


def pass_on(block: Tensor, comm: Communicator) -> Tensor:
    """Send a block to the next rank of the ring; return that of the rank before."""
    if comm.size == 1:
        return block
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arriving = torch.empty_like(block)
    comm.exchange(block, right, arriving, left)
    return arriving


# ---------------------------------------------------------------- one block


def attend(query: Tensor, block: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, d] of attention to a block alone, and its lse [B, H, T].

    `block` is keys and values [2, B, H_kv, T, d].
    """
    scores = scores_of(query, block, causal)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    return weights @ for_each_query(block[1], query).to(weights.dtype), lse


def attend_backward(
    gradient: Tensor, query: Tensor, block: Tensor, lse: Tensor, delta: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return what a block adds to the gradients of queries [B, H, T, d], and those of the block.

    With weights w = exp(score - lse), the gradient of a score is w (gradient · value - delta),
    where delta = gradient · output, of all blocks.
    """
    weights = (scores_of(query, block, causal) - lse.unsqueeze(-1)).exp()  # [B, H, T, T]
    key, value = (for_each_query(each, query).to(gradient.dtype) for each in block)
    to_scores = weights * (gradient @ value.mT - delta.unsqueeze(-1)) / query.shape[-1] ** 0.5
    to_key = to_scores.mT @ query.to(gradient.dtype)
    to_value = weights.mT @ gradient
    # Queries that share a key-value head add up.
    batch, _, time, width = query.shape
    groups = (2, batch, block.shape[2], -1, time, width)
    return to_scores @ key, torch.stack((to_key, to_value)).view(groups).sum(3)


def scores_of(query: Tensor, block: Tensor, causal: bool) -> Tensor:
    """Return query · key / √d in float32 at least: [B, H, T, T]; later keys are hidden if `causal`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    key = for_each_query(block[0], query).to(wide)
    scores: Tensor = query.to(wide) @ key.mT / query.shape[-1] ** 0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def for_each_query(x: Tensor, query: Tensor) -> Tensor:
    """Repeat key-value heads [B, H_kv, T, d] for the queries that share them: [B, H, T, d]."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)
