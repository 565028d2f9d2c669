"""Lesson 08, solved: the package's own where it has one: `minidist/parallel/tensor/sequence.py`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from minidist import Communicator
from minidist.model.gpt import causal_attention
from minidist.parallel import adjoint
from minidist.parallel.tensor.sequence import SequenceBoundary


def gather_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Enter a region."""
    return SequenceBoundary(comm).enter(x)


def scatter_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Leave a region."""
    return SequenceBoundary(comm).leave(x)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The norm that the exercise gives."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


def sequence_block(x: Tensor, mine: Mapping[str, Tensor], comm: Communicator) -> Tensor:
    """Norm and residual on this rank's tokens, the products on all tokens of this rank's channels."""
    every = gather_tokens(rms_norm(x, mine["norm.weight"]), comm)  # [B, T, D]
    hidden = F.gelu(F.linear(every, mine["up.weight"], mine["up.bias"]))  # [B, T, C/P]
    return x + scatter_tokens(F.linear(hidden, mine["down.weight"]), comm) + mine["down.bias"]


def sum_partial_gradients(gradients: Mapping[str, Tensor], comm: Communicator) -> None:
    """Sum the gradients of parameters that are whole on every rank and were used on a slice of the tokens."""
    partial = [gradients["norm.weight"], gradients["down.bias"]]
    sums = adjoint.reduce_from(torch.cat(partial), comm)
    for gradient, total in zip(partial, sums.split([len(gradient) for gradient in partial]), strict=True):
        gradient.copy_(total)


def ulysses_attention(query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
    """Exchange tokens for heads, compute attention, exchange back."""
    if query.shape[1] % comm.size:
        raise ValueError(f"{query.shape[1]} heads cannot be dealt out to {comm.size} ranks")

    def trade(x: Tensor, split: int, join: int) -> Tensor:
        chunks = torch.cat(x[None].chunk(comm.size, 1 + split))  # [P, ...], chunk j for rank j
        return torch.cat(adjoint.all_to_all(chunks, comm).unbind(), join)

    found = causal_attention(*(trade(x, 1, 2) for x in (query, key, value)))  # [B, H/P, T, d]
    return trade(found, 2, 1)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
    """Extend the softmax by one block of keys in each step."""
    right, left, time = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, query.shape[2]
    largest = query.new_full((*query.shape[:3], 1), -torch.inf)
    normalizer, total = torch.zeros_like(largest), torch.zeros_like(query)
    blocks = torch.stack((key, value))
    for step in range(comm.size):
        if step:
            arriving = torch.empty_like(blocks)
            comm.exchange(blocks, right, arriving, left)
            blocks = arriving
        if step <= comm.rank:  # else these tokens come after all of this rank's
            scores = query @ blocks[0].transpose(-1, -2) / query.shape[-1] ** 0.5
            if step == 0:
                scores = scores.masked_fill(torch.ones(time, time, dtype=torch.bool).triu(1), -torch.inf)
            larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
            shrink, weights = (largest - larger).exp(), (scores - larger).exp()
            normalizer = normalizer * shrink + weights.sum(-1, keepdim=True)
            total = total * shrink + weights @ blocks[1]
            largest = larger
    return total / normalizer


__all__ = [
    "adjoint",
    "causal_attention",
    "gather_tokens",
    "ring_attention",
    "rms_norm",
    "scatter_tokens",
    "sequence_block",
    "sum_partial_gradients",
    "ulysses_attention",
]
