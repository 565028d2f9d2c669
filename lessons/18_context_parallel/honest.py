"""Lesson 18, an honest answer: context parallelism by hand, from the handout alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist
from minidist import Communicator
from minidist.full.collectives import all_to_all
from minidist.full.context.flash import attend, attend_backward
from minidist.full.model import GPT, GPTConfig, Where
from minidist.full.model.attention import causal_attention

# ---------------------------------------------------------------- task 1: meet a block of keys


def meet(
    query: Tensor, output: Tensor, lse: Tensor, key: Tensor, value: Tensor, causal: bool
) -> None:
    """Task 1: let queries attend to one more block, and merge the result into theirs, in place."""
    more, its = attend(query, key, value, causal)
    weight = torch.sigmoid(its - lse)[..., None]  # exp(its) / (exp(its) + exp(lse))
    output.copy_((1 - weight) * output + weight * more)
    lse.copy_(torch.logaddexp(lse, its))


# ---------------------------------------------------------------- task 2: around the ring


def to_the_right(x: Tensor, comm: Communicator) -> Tensor:
    """Send `x` to the right neighbour; return what comes from the left one."""
    incoming = torch.empty_like(x)
    comm.exchange(
        x.contiguous(), (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size
    )
    return incoming


def ring_forward(
    query: Tensor, key: Tensor, value: Tensor, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """Task 2: return output and lse of causal attention of this rank's tokens to the tokens of all
    ranks.
    """
    output = torch.zeros(query.shape, dtype=query.dtype)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=query.dtype)
    block = torch.stack([key, value])
    for step in range(comm.size):
        if step > 0:
            block = to_the_right(block, comm)
        if step <= comm.rank:  # afterwards come the blocks of later ranks
            meet(query, output, lse, block[0], block[1], causal=step == 0)
    return output, lse


def ring_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    comm: Communicator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Task 2: return the gradients of this rank's query, key and value."""
    to_query = torch.zeros(query.shape, dtype=query.dtype)
    block = torch.stack([key, value])
    travelling = torch.zeros_like(block)
    for step in range(comm.size):
        if step > 0:
            block, travelling = to_the_right(block, comm), to_the_right(travelling, comm)
        if step <= comm.rank:
            dq, dk, dv = attend_backward(
                gradient, query, block[0], block[1], output, lse, step == 0
            )
            to_query += dq
            travelling[0] += dk
            travelling[1] += dv
    if comm.size > 1:
        travelling = to_the_right(travelling, comm)
    return to_query, travelling[0], travelling[1]


class RingAttention(torch.autograd.Function):
    """Given: your two functions as one that autograd knows. It keeps nothing of the size of T x
    T.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
        output, lse = ring_forward(query, key, value, comm)
        ctx.comm = comm
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *ring_backward(gradient, *ctx.saved_tensors, ctx.comm), None


# ---------------------------------------------------------------- task 3: which tokens a rank has


def positions(order: str, ranks: int, rank: int, time: int) -> Tensor:
    """Task 3: return which positions of a sequence of `time` tokens a rank has."""
    pieces = 2 * ranks if order == "zigzag" and ranks > 1 else ranks
    if time % pieces:
        raise ValueError(f"{pieces} does not divide {time} tokens")
    if order == "striped":
        return torch.arange(rank, time, ranks)
    length = time // pieces
    if order == "contiguous" or ranks == 1:
        return torch.arange(rank * length, (rank + 1) * length)
    last = 2 * ranks - 1 - rank
    early, late = (torch.arange(chunk * length, (chunk + 1) * length) for chunk in (rank, last))
    return torch.cat([early, late])


class Meeting(NamedTuple):
    """Given: the part of a block that a rank has to compute. Slices count tokens of one rank, in
    its own order.

    Of `queries` and `keys`, all see all, or if `causal`, query i of these sees key j of those only
    if j <= i.
    """

    queries: slice = slice(None)
    keys: slice = slice(None)
    causal: bool = False


def meeting(order: str, mine: int, source: int, time: int) -> Meeting | None:
    """Task 3: return which queries of rank `mine` see which keys of rank `source`."""
    if mine == source:
        return Meeting(causal=True)
    if order == "contiguous":
        return Meeting() if source < mine else None
    if order == "zigzag":
        half = time // 2
        if source < mine:
            return Meeting(keys=slice(0, half))
        return Meeting(queries=slice(half, time))
    if source < mine:
        return Meeting(causal=True)
    if time == 1:
        return None
    return Meeting(queries=slice(1, time), keys=slice(0, time - 1), causal=True)


# ---------------------------------------------------------------- task 4: heads for tokens


class Trade(torch.autograd.Function):
    """All-to-all of [P, ...]: chunk j goes to rank j, and in backward its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, chunks: Tensor, comm: Communicator) -> Tensor:
        """Return the chunks that arrived, by sender."""
        ctx.comm = comm
        return all_to_all(chunks.contiguous(), comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Send each chunk's gradient to where the chunk came from."""
        return all_to_all(gradient.contiguous(), ctx.comm), None


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, everyones: Tensor, comm: Communicator
) -> Tensor:
    """Task 4: return causal attention of this rank's tokens to the tokens of all ranks."""
    heads, groups, ranks = query.shape[1], key.shape[1], comm.size
    if heads % ranks or (groups % ranks and ranks % groups):
        raise ValueError(
            f"{heads} heads and {groups} of keys cannot be shared out among {ranks} ranks"
        )
    if groups < ranks:
        key, value = (x.repeat_interleave(ranks // groups, dim=1) for x in (key, value))
    order = everyones.argsort()

    def all_tokens(x: Tensor) -> Tensor:
        """[B, H, T/P, d] to [B, H/P, T, d], in the order of positions."""
        traded = Trade.apply(torch.stack(x.chunk(ranks, dim=1)), comm)
        return torch.cat(list(traded), dim=2)[:, :, order]

    found = causal_attention(all_tokens(query), all_tokens(key), all_tokens(value))
    back = Trade.apply(torch.stack(found[:, :, everyones].chunk(ranks, dim=2)), comm)
    return torch.cat(list(back), dim=1)


# ---------------------------------------------------------------- task 5: the rest of a training step

PADDING = 0  # the token behind a row's end: nobody has to predict it


def share_of_the_loss(
    model: Callable[[Tensor, Where], Tensor], tokens: Tensor, mine: Tensor
) -> Tensor:
    """Task 5: return this rank's share of the loss, a scalar with gradients."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits = model(inputs[:, mine], Where(positions=mine))
    total = F.cross_entropy(
        logits.flatten(0, 1), labels[:, mine].flatten(), ignore_index=PADDING, reduction="sum"
    )
    return total / (labels != PADDING).sum()


# ---------------------------------------------------------------- try it


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    generator = torch.Generator().manual_seed(0)
    time = 4 * comm.size
    query, key, value = (
        torch.randn(1, comm.size, time, 8, generator=generator).double() for _ in range(3)
    )
    whole = causal_attention(query, key, value)

    def own(x: Tensor) -> Tensor:
        return x.chunk(comm.size, 2)[comm.rank].contiguous()

    def differs(found: Tensor, expected: Tensor) -> str:
        return f"differs from the whole one by {float((found - expected).detach().abs().max()):.0e}"

    def task_1() -> str:
        output, lse = torch.zeros_like(query), torch.full_like(query[..., 0], -torch.inf)
        for keys, values in zip(key.chunk(2, 2), value.chunk(2, 2), strict=True):
            meet(query, output, lse, keys, values, False)
        return differs(output, attend(query, key, value, False)[0])

    def task_2() -> str:
        leaves, everything = (
            [own(x).requires_grad_() for x in (query, key, value)],
            [query, key, value],
        )
        found = RingAttention.apply(*leaves, comm)
        gradients = torch.autograd.grad(found.sum(), leaves)
        for x in everything:
            x.requires_grad_()
        expected = torch.autograd.grad(causal_attention(*everything).sum(), everything)
        worst = max(
            float((mine - own(all_of)).abs().max())
            for mine, all_of in zip(gradients, expected, strict=True)
        )
        return f"{differs(found, own(whole))}, gradients by {worst:.0e}"

    def task_3() -> str:
        rank = positions("zigzag", comm.size, 0, time).tolist()
        return f"in zigzag order rank 0 has {rank}, and meets the last rank's keys at " + str(
            meeting("zigzag", 0, comm.size - 1, 4)
        )

    def task_4() -> str:
        return differs(
            ulysses_attention(own(query), own(key), own(value), torch.arange(time), comm),
            own(whole),
        )

    def task_5() -> str:
        model = GPT(
            GPTConfig(vocabulary=9, layers=1, hidden=8, heads=2, intermediate=8, sequence=time)
        )
        tokens = torch.arange(time + 1)[None] % 9
        loss = share_of_the_loss(model, tokens, torch.arange(time))
        return (
            f"alone, a rank's share is all of the loss: {loss.item():.2f}, expected about "
            f"{torch.tensor(9).log():.2f}"
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
