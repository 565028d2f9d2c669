"""A pipeline on one page: 1F1B as one rank does it, written out by hand.

    rank 0    F0 F1 F2 F3          B0    B1    B2    B3
    rank 1       F0 F1 F2       B0 F3 B1    B2    B3
    rank 2          F0 F1    B0 F2 B1 F3 B2    B3
    rank 3             F0 B0 F1 B1 F2 B2 F3 B3

Rank r has stage r, and begins with one forward for each rank behind it. Then a backward follows
each forward, so a rank never holds more than P - r microbatches. GPipe, with all forwards before
all backwards, would hold all of them.

Every send waits for its receive. Two neighbours may have something for each other at the same time:
one an output, the other a gradient. If both sent first, both would wait for ever; so they exchange.

Cost: between two neighbours 2 messages for each microbatch, an output and a gradient. (Narayanan et
al. 2019, "PipeDream", section 3.2; with a flush at the end of each step: Narayanan et al. 2021,
section 2.2.1.)
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minidist.full.comm import Communicator


def one_forward_one_backward(
    stage: Callable[[Tensor], Tensor],
    comm: Communicator,
    inputs: Sequence[Tensor],
    targets: Sequence[Any],
    loss: Callable[[Tensor, Any], Tensor],
    carried: Callable[[Tensor], Tensor],
) -> float:
    """Take one step; return the sum of all microbatches' losses on the last rank, and 0 on the
    others. Collective.

    The gradients of that sum are added to `parameter.grad`. Only the first rank reads the values of
    `inputs`, and only the last rank those of `targets`. `carried(inputs[m])` is an empty tensor of
    the shape and dtype that goes from rank to rank.
    """
    count, last = len(inputs), comm.rank == comm.size - 1
    before, after = Neighbour(comm, comm.rank - 1), Neighbour(comm, comm.rank + 1)
    # input and output of each microbatch that waits for its backward
    held: deque[tuple[Tensor, Tensor]] = deque()
    total = 0.0

    def room(microbatch: int) -> Tensor:
        return (
            inputs[microbatch] if comm.rank == 0 else carried(inputs[microbatch]).requires_grad_()
        )

    def forward(microbatch: int, x: Tensor) -> Tensor:
        nonlocal total
        y = stage(x)
        if last:
            y = loss(y, targets[microbatch])
            total += float(y.detach())
        held.append((x, y))
        return y.detach()

    def backward(gradient: Tensor) -> Tensor:
        x, y = held.popleft()
        y.backward(None if last else gradient)  # type: ignore[no-untyped-call]
        # tokens have none, and the first rank sends none
        return torch.empty(0) if x.grad is None else x.grad

    warm_up = min(comm.size - 1 - comm.rank, count)
    for microbatch in range(warm_up):
        x = before.receive(room(microbatch))
        after.send(forward(microbatch, x))
    if warm_up < count:
        x = before.receive(room(warm_up))
    for microbatch in range(warm_up, count):
        gradient = after.exchange(forward(microbatch, x), carried(inputs[microbatch - warm_up]))
        if microbatch + 1 < count:
            x = before.exchange(backward(gradient), room(microbatch + 1))
        else:
            before.send(backward(gradient))
    for microbatch in range(count - warm_up, count):
        gradient = after.receive(carried(inputs[microbatch]))
        before.send(backward(gradient))
    return total


class Neighbour:
    """The rank before or after this one.

    At the ends of the pipeline there is none, and nothing is sent.
    """

    def __init__(self, comm: Communicator, rank: int) -> None:
        self.comm, self.rank, self.exists = comm, rank, 0 <= rank < comm.size

    def send(self, tensor: Tensor) -> None:
        """Send, and wait for the receive."""
        if self.exists:
            self.comm.send(tensor, self.rank)

    def receive(self, room: Tensor) -> Tensor:
        """Return `room`, filled."""
        if self.exists:
            self.comm.recv(room, self.rank)
        return room

    def exchange(self, tensor: Tensor, room: Tensor) -> Tensor:
        """Send, and return `room`, filled."""
        if self.exists:
            self.comm.exchange(tensor, self.rank, room, self.rank)
        return room
