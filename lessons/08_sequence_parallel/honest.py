"""Lesson 08, an honest answer: sequence parallelism by hand, from the handout alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist
from minidist import Communicator
from minidist.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from minidist.model.gpt import causal_attention

# ---------------------------------------------------------------- given


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Divide by the root mean square of the channels, and scale each channel."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


# ---------------------------------------------------------------- task 1: the two borders


def join(x: Tensor, comm: Communicator) -> Tensor:
    """All-gather along the tokens: [B, T/P, D] to [B, T, D]."""
    tokens_first = x.movedim(1, 0).contiguous()
    return all_gather(tokens_first, comm, counts=[len(tokens_first)] * comm.size).movedim(0, 1).contiguous()


def sum_and_cut(x: Tensor, comm: Communicator) -> Tensor:
    """Reduce-scatter along the tokens: [B, T, D] to [B, T/P, D]."""
    return reduce_scatter(x.movedim(1, 0).contiguous(), comm).movedim(0, 1).contiguous()


class Gather(torch.autograd.Function):
    """All-gather, whose backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Return all tokens."""
        ctx.comm = comm
        return join(x, comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all ranks' gradients for this rank's tokens."""
        return sum_and_cut(gradient, ctx.comm), None


class Scatter(torch.autograd.Function):
    """Reduce-scatter, whose backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Return the sum of all ranks' terms for this rank's tokens."""
        ctx.comm = comm
        return sum_and_cut(x, comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all tokens."""
        return join(gradient, ctx.comm), None


def gather_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1: return all ranks' tokens [B, T, D]; of them this rank brings `x` [B, T/P, D]."""
    result: Tensor = Gather.apply(x, comm)
    return result


def scatter_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1: return this rank's tokens [B, T/P, D] of the sum of all ranks' `x` [B, T, D]."""
    result: Tensor = Scatter.apply(x, comm)
    return result


# ---------------------------------------------------------------- task 2: a block


def sequence_block(x: Tensor, mine: Mapping[str, Tensor], comm: Communicator) -> Tensor:
    """Task 2: return this rank's tokens of  x + down(gelu(up(norm(x))))."""
    every = gather_tokens(rms_norm(x, mine["norm.weight"]), comm)  # [B, T, D]
    hidden = F.gelu(F.linear(every, mine["up.weight"], mine["up.bias"]))  # [B, T, C/P]
    return x + scatter_tokens(F.linear(hidden, mine["down.weight"]), comm) + mine["down.bias"]  # [B, T/P, D]


# ---------------------------------------------------------------- task 3: gradients that are only a part


def sum_partial_gradients(gradients: Mapping[str, Tensor], comm: Communicator) -> None:
    """Task 3: replace gradients of which every rank has some terms by their sums, in place."""
    partial = [gradients["norm.weight"], gradients["down.bias"]]
    together = torch.cat([gradient.flatten() for gradient in partial])
    all_reduce(together, comm)
    for gradient, total in zip(partial, together.split([gradient.numel() for gradient in partial]), strict=True):
        gradient.copy_(total.view_as(gradient))


# ---------------------------------------------------------------- tasks 4 and 5: attention over a split sequence


class Trade(torch.autograd.Function):
    """All-to-all of [P, ...]: chunk j goes to rank j. Its own adjoint."""

    @staticmethod
    def forward(ctx: Any, chunks: Tensor, comm: Communicator) -> Tensor:
        """Return the chunks that came, by sender."""
        ctx.comm = comm
        return all_to_all(chunks.contiguous(), comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Send every chunk's gradient home."""
        return all_to_all(gradient.contiguous(), ctx.comm), None


def ulysses_attention(query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
    """Task 4: return this rank's tokens of causal attention over all tokens, by heads."""
    heads = query.shape[1]
    if heads % comm.size:
        raise ValueError(f"{heads} heads cannot be shared out evenly among {comm.size} ranks")

    def all_tokens(x: Tensor) -> Tensor:
        """[B, H, T/P, d] to [B, H/P, T, d]."""
        by_head = x.unflatten(1, (comm.size, -1)).movedim(1, 0)  # [P, B, H/P, T/P, d], by receiver
        by_token: Tensor = Trade.apply(by_head, comm)  # the same shape, by sender
        return by_token.movedim(0, 2).flatten(2, 3)

    def all_heads(x: Tensor) -> Tensor:
        """[B, H/P, T, d] to [B, H, T/P, d]."""
        by_token = x.unflatten(2, (comm.size, -1)).movedim(2, 0)  # [P, B, H/P, T/P, d], by receiver
        by_head: Tensor = Trade.apply(by_token, comm)
        return by_head.movedim(0, 1).flatten(1, 2)

    return all_heads(causal_attention(all_tokens(query), all_tokens(key), all_tokens(value)))


@torch.no_grad()
def ring_attention(query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
    """Task 5: the same as task 4, forward only, by passing keys and values around a ring."""
    rank, ranks = comm.rank, comm.size
    tokens, head_dim = query.shape[-2:]
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(diagonal=1)
    largest = torch.full_like(query[..., :1], -math.inf)
    total, result = torch.zeros_like(largest), torch.zeros_like(query)
    visiting = torch.stack([key, value])
    incoming = torch.empty_like(visiting)
    for step in range(ranks):
        source = (rank - step) % ranks
        if source <= rank:  # the others are in the future
            scores = query @ visiting[0].transpose(-1, -2) / math.sqrt(head_dim)
            if source == rank:
                scores = scores.masked_fill(later, -math.inf)
            larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - larger).exp(), (largest - larger).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            result = result * shrink + weights @ visiting[1]
            largest = larger
        if step < ranks - 1:
            comm.exchange(visiting, (rank + 1) % ranks, incoming, (rank - 1) % ranks)
            visiting, incoming = incoming, visiting
    return result / total


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
