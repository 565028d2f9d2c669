"""Context parallelism: a sequence is cut among ranks, and keys and values go round a ring.

    rank r attends to its own tokens. Then, P - 1 times:
        hand the block of keys and values to rank r + 1, and take that of rank r - 1
        if its tokens are earlier than this rank's, attend to it, and merge the result

Softmax over all keys is a mean of the softmaxes over blocks of keys, each weighted by its sum of
exponentials. Only the logarithm of that sum is kept, `lse`, so that nothing overflows:

    so far   output, lse   ─┐
                            ├─▶ output + σ(lse' - lse) (output' - output),   log(exp(lse) + exp(lse'))
    block    output', lse' ─┘

Backward goes round once more, and with each block travel its gradients, to which ranks add terms.
Cost: forward passes P - 1 blocks on, 2 B T/P D_kv numbers each; backward twice as much, and one hop
more. A rank holds its own tokens and two blocks. Rank P - 1 computes most: causal attention gives
later tokens more to do. (Liu, Zaharia & Abbeel 2023, "Ring attention", algorithm 1; Milakov &
Gimelshein 2018 for `lse`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm import Communicator
from minidist.model import Attention


class RingAttention(torch.autograd.Function):
    """Attends to one block after the other, and goes round again in backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
        """Attend to the own block, then to those of earlier tokens, and merge."""
        own = torch.stack((key, value))
        output, lse = attend(query, own, causal=True)
        for source, block in go_round(own, comm):
            if source < comm.rank:
                more, its_lse = attend(query, block, causal=False)
                share = torch.sigmoid(its_lse - lse)
                output.lerp_(more, share)
                lse = torch.logaddexp(lse, its_lse)
        ctx.comm = comm
        ctx.save_for_backward(query, own, output, lse)
        return output.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of query, key and value."""
        query, own, output, lse = ctx.saved_tensors
        comm = ctx.comm
        gradient = gradient.to(output.dtype)
        delta = (gradient * output).sum(-1, keepdim=True)  # [B, H, T/P, 1]
        query_grad, block_grad = attend_backward(gradient, query, own, lse, delta, causal=True)
        for source, block in go_round(own, comm):
            block_grad = pass_on(block_grad, comm)  # it follows its block
            if source < comm.rank:
                more, term = attend_backward(gradient, query, block, lse, delta, causal=False)
                query_grad += more
                block_grad += term
        block_grad = pass_on(block_grad, comm)  # one hop more, and it is at home
        key_grad, value_grad = block_grad.to(own.dtype)
        return query_grad.to(query.dtype), key_grad, value_grad, None


def go_round(block: Tensor, comm: Communicator) -> Iterator[tuple[int, Tensor]]:
    """Yield each other rank, from the one before, and its block, which comes along the ring."""
    for hop in range(1, comm.size):
        block = pass_on(block, comm)
        source = (comm.rank - hop) % comm.size
        yield source, block


def pass_on(block: Tensor, comm: Communicator) -> Tensor:
    """Send a block to the next rank of the ring; return that of the rank before."""
    if comm.size == 1:
        return block
    right = (comm.rank + 1) % comm.size
    left = (comm.rank - 1) % comm.size
    arriving = torch.empty_like(block)
    comm.exchange(block, right, arriving, left)
    return arriving


def attend(query: Tensor, block: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return output [B, H, T, d] and lse [B, H, T, 1] of attention to a block [2, B, H_kv, T, d]."""
    query, key, value = widened(query, block)
    scores = scores_of(query, key, causal)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp()
    return weights @ value, lse


def attend_backward(
    gradient: Tensor, query: Tensor, block: Tensor, lse: Tensor, delta: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return what a block adds to the gradients of queries [B, H, T, d], and those of the block.

    Its weights in the softmax over all blocks are w = exp(score - lse), with the merged lse. The
    gradient of a score is w (gradient · value - delta), where delta = gradient · merged output.
    """
    query, key, value = widened(query, block)
    scores = scores_of(query, key, causal)
    weights = (scores - lse).exp()  # [B, H, T, T]
    weights_grad = gradient @ value.mT
    scores_grad = weights * (weights_grad - delta)
    products_grad = scores_grad / query.shape[-1] ** 0.5
    query_grad = products_grad @ key
    key_grad = products_grad.mT @ query
    value_grad = weights.mT @ gradient
    both_grad = torch.stack((key_grad, value_grad))  # [2, B, H, T, d]
    # Queries that share a key-value head add up: [2, B, H_kv, H/H_kv, T, d], summed.
    key_heads = block.shape[2]
    by_head = torch.unflatten(both_grad, 2, (key_heads, -1))
    return query_grad, by_head.sum(3)


def widened(query: Tensor, block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key, value in float32 at least, with as many heads of each: [B, H, T, d]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    queries_of_a_key = query.shape[1] // block.shape[2]
    repeated = block.repeat_interleave(queries_of_a_key, dim=2)
    key, value = repeated.to(wide)
    return query.to(wide), key, value


def scores_of(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Return query · key / √d [B, H, T, T]; later keys are hidden if `causal`."""
    products = query @ key.mT
    scores: Tensor = products / query.shape[-1] ** 0.5
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def ring_attention(query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
    """Return causal attention [B, H, T/P, d] of this rank's queries to the keys of all ranks."""
    result: Tensor = RingAttention.apply(query, key, value, comm)  # type: ignore[no-untyped-call]
    return result


def context_parallel(model: nn.Module, comm: Communicator) -> None:
    """Have all attention of a model go round the ring: every rank has T/P tokens, in order."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = partial(ring_attention, comm=comm)
