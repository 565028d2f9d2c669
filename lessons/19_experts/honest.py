"""Lesson 19, an honest answer: experts by hand, from the handout alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import minidist
from minidist import Communicator
from minidist.full.adjoint import all_to_all as exchange
from minidist.full.collectives import all_reduce, all_to_all

# ---------------------------------------------------------------- task 1: route


def route(x: Tensor, router: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Task 1: choose k experts for each token, and say how much each of them counts."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = torch.softmax(x.to(wide) @ router.to(wide).T, dim=1)
    choice = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, choice)
    if k > 1:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return choice, weights


# ---------------------------------------------------------------- task 2: dispatch

Experts = Callable[[Tensor, list[int]], Tensor]
"""Maps rows [N, D], sorted by expert, to what this rank's experts make of them [N, D]; the list has
one number for each of its experts, how many of the rows are this expert's, and adds up to N.
"""


def dispatch(
    x: Tensor, choice: Tensor, weights: Tensor, experts: Experts, held: int, comm: Communicator
) -> Tensor:
    """Task 2: return for each token the weighted sum of what its experts make of it: [M, D]."""
    k, ranks = choice.shape[1], comm.size
    wanted = choice.flatten()
    order = torch.sort(wanted, stable=True).indices  # row i of what is sent is choice order[i]
    rows = x[order // k]
    counts = torch.bincount(wanted, minlength=held * ranks).view(ranks, held)
    coming = all_to_all(counts, comm)  # by sender, and of each sender by expert
    sent, received = counts.sum(1).tolist(), coming.sum(1).tolist()
    arrived = exchange(rows, comm, sent, received)
    whose = torch.arange(held).repeat(ranks).repeat_interleave(coming.flatten())
    by_expert = torch.sort(whose, stable=True).indices
    made = experts(arrived[by_expert], coming.sum(0).tolist())
    back = exchange(made[torch.argsort(by_expert)], comm, received, sent)
    unsorted = back[torch.argsort(order)].view(len(x), k, x.shape[1])
    return (unsorted * weights[:, :, None]).sum(1)


# ---------------------------------------------------------------- task 3: balance


@dataclass
class Layer:
    """Given: what a layer of experts remembers beside its parameters.

    Attributes
    ----------
    bias : Tensor
        int64 [E]: of each expert how often its bias rose, less how often it fell.
    tally : Tensor
        int64 [E]: how many of this rank's choices fell on each expert since the last `rebalance`.
    """

    bias: Tensor
    tally: Tensor


def balance_loss(scores: Tensor, choice: Tensor, comm: Communicator) -> Tensor:
    """Task 3: return this rank's share of the auxiliary loss, a scalar with gradients."""
    number = scores.shape[2]
    counts = torch.zeros(len(scores), number, dtype=torch.int64)
    for sequence, of_sequence in enumerate(choice):
        counts[sequence] = torch.bincount(of_sequence.flatten(), minlength=number)
    all_reduce(counts, comm)
    fractions = counts / counts.sum(1, keepdim=True).to(scores.dtype)
    return number * (fractions[:, None, :] * scores).sum()


class Attached(torch.autograd.Function):
    """The weights, with a loss that hangs on them."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, layer: Layer, counts: Tensor) -> Tensor:
        """Return the weights."""
        ctx.layer, ctx.counts, ctx.like = layer, counts, loss
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Count, and train the loss."""
        ctx.layer.tally = ctx.layer.tally + ctx.counts
        return gradient, torch.ones_like(ctx.like), None, None


def attach(weights: Tensor, loss: Tensor, layer: Layer, counts: Tensor) -> Tensor:
    """Task 3: return the weights, unchanged; backward through them trains the loss, too, and
    counts.
    """
    return Attached.apply(weights, loss, layer, counts)


def kept(
    choice: Tensor, positions: Tensor, time: int, experts: int, factor: float, comm: Communicator
) -> Tensor:
    """Task 3: return which choices have room: bool [B, T', k]."""
    k = choice.shape[2]
    capacity = math.ceil(factor * k * time / experts)
    asked = torch.zeros(len(choice), time, experts, dtype=torch.int64)
    for j in range(k):
        for sequence in range(len(choice)):
            asked[sequence, positions, choice[sequence, :, j]] = 1
    all_reduce(asked, comm)
    # how many earlier tokens of the sequence asked the same expert
    before = asked.cumsum(1) - asked
    room = before[:, positions] < capacity
    return room.gather(2, choice)


def rebalance(layer: Layer, comm: Communicator) -> None:
    """Task 3: move each bias by one, and begin a new tally. It is called once a step, after the
    last backward.
    """
    total = layer.tally.clone()
    all_reduce(total, comm)
    below = total * len(total)  # compared as integers
    layer.bias = layer.bias + (below < total.sum()).long() - (below > total.sum()).long()
    layer.tally = torch.zeros_like(layer.tally)


# ---------------------------------------------------------------- task 4: experts on ep ranks, in edp copies


def groups(comm: Communicator, ep: int) -> tuple[Communicator, Communicator]:
    """Task 4: return two groups that this rank belongs to: those who share the experts, and those
    who have the same.
    """
    return comm.split(comm.rank // ep), comm.split(comm.rank % ep)


def synchronize(
    router: Tensor, experts: Sequence[Tensor], tokens: int, edp: Communicator, comm: Communicator
) -> None:
    """Task 4: leave in `.grad` of each parameter the gradient of the mean loss over the tokens of
    all ranks.
    """
    everyones = torch.tensor([tokens])
    all_reduce(everyones, comm)
    for parameters, group in (([router], comm), (experts, edp)):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad, group)
            parameter.grad /= everyones


# ---------------------------------------------------------------- try it


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    generator = torch.Generator().manual_seed(0)
    ranks, each = comm.size, 3
    x = torch.randn(4, 8, generator=generator).double()
    router = torch.randn(2 * ranks, 8, generator=generator).double().requires_grad_()

    def task_1() -> str:
        choice, weights = route(x, router, torch.zeros(2 * ranks).double(), 2)
        return (
            f"token 0 goes to the experts {choice[0].tolist()}, with weights {weights[0].tolist()}"
        )

    def task_2() -> str:
        choice = (torch.arange(4)[:, None] + torch.arange(2)) % (2 * ranks)
        weights = torch.full((4, 2), 0.5).double()

        def scaled(rows: Tensor, counts: list[int]) -> Tensor:
            """Multiply each row by the number of its expert."""
            numbers = 2 * comm.rank + torch.arange(2)
            return rows * numbers.repeat_interleave(torch.tensor(counts))[:, None]

        found = dispatch(x, choice, weights, scaled, 2, comm)
        expected = x * choice.double().mean(1)[:, None]
        return f"differs from the expected sum by {float((found - expected).abs().max()):.0e}"

    def task_3() -> str:
        choice = torch.zeros(1, each, 1, dtype=torch.int64)
        loss = balance_loss(torch.ones(1, each, 4) / 4, choice, comm)
        layer = Layer(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
        attach(
            torch.ones(1).requires_grad_(), loss, layer, torch.tensor([each, 0, 0, 0])
        ).sum().backward()
        rebalance(layer, comm)
        places = comm.rank + ranks * torch.arange(each)
        room = kept(choice, places, each * ranks, 4, 1.0, comm)
        return (
            f"loss {loss.item():g}, bias {layer.bias.tolist()}, of rank 0's choices "
            f"{int(room.sum())} have room"
        )

    def task_4() -> str:
        share, copies = groups(comm, ranks)
        weight = torch.ones(1).double().requires_grad_()
        router.grad, weight.grad = torch.ones_like(router), torch.ones_like(weight)
        synchronize(router, [weight], 2, copies, comm)
        return (
            f"{share.size} ranks share the experts; gradients {router.grad[0, 0]:g} and "
            f"{weight.grad.item():g}"
        )

    for number, task in enumerate((task_1, task_2, task_3, task_4), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
