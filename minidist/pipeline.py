"""A pipeline: each rank has some of the layers, and microbatches pass through them.

    rank 0    F0 F1 F2 F3                   B0       B1       B2       B3
    rank 1       F0 F1 F2             B0    F3 B1       B2       B3
    rank 2          F0 F1       B0    F2 B1    F3 B2       B3       1F1B; a backward takes
    rank 3             F0 B0    F1 B1    F2 B2    F3 B3             twice as long as a forward

GPipe runs all forwards, then all backwards, and so holds the activations of all m microbatches.
1F1B begins with one forward for each later rank; then a backward follows each forward, so rank r of
P never holds more than P - r. Both idle for (P - 1)/(m + P - 1) of the step, the *bubble*: (P - 1)/m
of the time they compute. Cost: an output and a gradient for each microbatch and pair of neighbours.

This page has 1F1B by hand, then schedules as data, and one loop that runs any of them. (Huang et al.
2019, "GPipe"; Narayanan et al. 2019, "PipeDream", section 3.2; 2021, with a flush after each step.)
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce
from minidist.comm import Communicator, Request
from minidist.model import GPT, rotary_table

Forward: TypeAlias = Callable[[Tensor, int], Tensor]
"""Maps a microbatch's input and number to the next rank's input; on the last rank, to the loss."""

# ---------------------------------------------------------------- the idea: 1F1B by hand


def one_forward_one_backward(
    forward: Forward, inputs: Sequence[Tensor], like: Tensor, comm: Communicator
) -> None:
    """Add the gradients of all microbatches to `parameter.grad`. Collective.

    Only the first rank reads `inputs`, one for each microbatch. A message has the shape and dtype of
    `like`. A send waits for its receive. If two neighbours have an output and a gradient for each
    other, and both sent first, both would wait for ever: therefore they exchange.
    """
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    before, after = comm.rank - 1, comm.rank + 1
    count = len(inputs)
    held: deque[tuple[Tensor, Tensor]] = deque()  # input and output until backward

    def run_forward(microbatch: int, x: Tensor) -> Tensor:
        y = forward(x, microbatch)
        held.append((x, y))
        return y.detach().contiguous()

    def run_backward(gradient: Tensor | None) -> Tensor:
        x, y = held.popleft()
        torch.autograd.backward(y, gradient)
        return x if x.grad is None else x.grad  # tokens have none, and the first rank sends none

    def exchange(leaving: Tensor, peer: int) -> Tensor:
        arriving = torch.empty_like(like)
        comm.exchange(leaving, peer, arriving, peer)
        return arriving

    def first_input(microbatch: int) -> Tensor:
        return inputs[microbatch] if first else receive(like, comm, before).requires_grad_()

    # Warm-up: fill the later ranks.
    warm_up = min(comm.size - 1 - comm.rank, count)
    for microbatch in range(warm_up):
        comm.send(run_forward(microbatch, first_input(microbatch)), after)

    # Steady state: one forward, one backward. Each message meets one that goes the other way.
    if warm_up < count:
        x = first_input(warm_up)
    for microbatch in range(warm_up, count):
        y = run_forward(microbatch, x)
        gradient = run_backward(None if last else exchange(y, after))
        if microbatch + 1 < count:
            x = inputs[microbatch + 1] if first else exchange(gradient, before).requires_grad_()
        elif not first:
            comm.send(gradient, before)

    # Cool-down: as many backwards are left as there were forwards in the warm-up.
    for _ in range(warm_up):
        gradient = run_backward(receive(like, comm, after))
        if not first:
            comm.send(gradient, before)


def receive(like: Tensor, comm: Communicator, peer: int) -> Tensor:
    """Return what a neighbour sends, a tensor like `like`."""
    arriving = torch.empty_like(like)
    comm.recv(arriving, peer)
    return arriving


# ---------------------------------------------------------------- schedules as data


class Action(NamedTuple):
    """A forward ("F") or a backward ("B") of a microbatch, drawn as F2."""

    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Schedule: TypeAlias = list[list[Action]]
"""The actions of each rank, in order."""

TIME = {"F": 1, "B": 2}  # of an action, in units of a forward


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Return all forwards, then all backwards."""
    actions = [Action(kind, microbatch) for kind in "FB" for microbatch in range(microbatches)]
    return [actions] * ranks


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Return a warm-up of one forward for each later rank; then a backward after each forward."""
    schedule = []
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, microbatches)
        actions = [Action("F", microbatch) for microbatch in range(warm_up)]
        for microbatch in range(microbatches):
            if warm_up + microbatch < microbatches:
                actions.append(Action("F", warm_up + microbatch))
            actions.append(Action("B", microbatch))
        schedule.append(actions)
    return schedule


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def check(schedule: Schedule) -> dict[tuple[int, Action], int]:
    """Return when each rank's actions end, in units of a forward; raise if they do not fit."""
    ranks = len(schedule)
    everything = sorted(gpipe(1, len(schedule[0]) // 2)[0])
    orders = [sorted(actions, key=lambda action: action.kind) for actions in schedule]
    for rank, order in enumerate(orders):
        complete = sorted(order) == everything
        # A message does not say of which microbatch it is: two ranks must take them in one order.
        if not complete or order != orders[0]:
            rule = "every microbatch once, forward and backward, in the order of rank 0"
            raise ValueError(f"rank {rank} must run {rule}")
    left = [deque(actions) for actions in schedule]
    ends: dict[tuple[int, Action], int] = {}
    free = [0] * ranks  # when each rank has finished what it has begun
    while any(left):
        heads = {rank: actions[0] for rank, actions in enumerate(left) if actions}
        able = [rank for rank in heads if needs(rank, heads[rank], ranks) <= ends.keys()]
        if not able:
            stuck = [f"rank {rank} at {action}" for rank, action in heads.items()]
            raise ValueError(f"the schedule cannot go on: {', '.join(stuck)}")
        for rank in able:
            action = left[rank].popleft()
            ready = [ends[needed] for needed in needs(rank, action, ranks)]
            free[rank] = max([free[rank], *ready]) + TIME[action.kind]
            ends[rank, action] = free[rank]
    return ends


def needs(rank: int, action: Action, ranks: int) -> set[tuple[int, Action]]:
    """Return the actions, each with its rank, whose results an action takes."""
    if action.kind == "F":
        needed = {(rank - 1, action)}
    else:
        forward = Action("F", action.microbatch)
        needed = {(rank, forward), (rank + 1, action)}
    return {(where, what) for where, what in needed if 0 <= where < ranks}


def bubble(schedule: Schedule) -> float:
    """Return which share of the step a rank is idle, in the mean: (P - 1)/(m + P - 1) for 1F1B."""
    step = max(check(schedule).values())
    busy = sum(TIME[action.kind] for actions in schedule for action in actions)
    return 1 - busy / (step * len(schedule))


def in_flight(schedule: Schedule) -> list[int]:
    """Return for how many microbatches each rank holds activations at most."""
    changes = {"F": 1, "B": -1}
    most = []
    for actions in schedule:
        held = accumulate((changes[kind] for kind, _ in actions), initial=0)
        most.append(max(held))
    return most


def draw(schedule: Schedule) -> str:
    """Return a line for each rank, in which a forward is as wide as the longest label."""
    lines = []
    ends = check(schedule)
    width = len(f"{max(schedule[0])} ")
    for rank, actions in enumerate(schedule):
        line = ""
        for action in actions:
            start = ends[rank, action] - TIME[action.kind]
            line = line.ljust(width * start) + str(action)
        lines.append(f"rank {rank}    {line}")
    return "\n".join(lines)


class Stage(nn.Module):
    """Some layers of a GPT; on the first rank the embedding, too, on the last the norm and the head."""

    def __init__(self, model: GPT, comm: Communicator) -> None:
        super().__init__()
        self.config, self.comm = model.config, comm
        self.is_first, self.is_last = comm.rank == 0, comm.rank == comm.size - 1
        own = np.array_split(range(model.config.layers), comm.size)[comm.rank].tolist()
        self.layers = nn.ModuleDict({str(index): model.layers[index] for index in own})
        nothing = nn.Identity()
        # A tied matrix is on two ranks, the first and the last: they have to sum its gradients.
        has_words = self.is_first or (self.is_last and model.config.tied)
        self.embedding: nn.Module = model.embedding if has_words else nothing
        self.norm: nn.Module = model.norm if self.is_last else nothing
        self.head: nn.Module = model.head if self.is_last else nothing
        self.word_ranks = comm.split(int(has_words))
        self.word_ranks.traffic = comm.traffic

    def forward(self, x: Tensor, first: int, length: int) -> Tensor:
        """Return the next rank's input, or logits, of tokens at `first` to `first + length` - 1."""
        if self.is_first:
            x = self.embedding(x)
        rotary = rotary_table(self.config, first, length, x)
        for layer in self.layers.values():
            x = layer(x, rotary)
        output: Tensor = self.head(self.norm(x))
        return output

    def sum_tied_gradients(self) -> None:
        """Give both copies of a tied matrix the gradient of both, after backward. Collective."""
        for parameter in self.embedding.parameters():
            if self.word_ranks.size > 1 and parameter.grad is not None:
                all_reduce(parameter.grad, self.word_ranks)


class Pipeline:
    """Runs any schedule: forwards send outputs to rank + 1, backwards gradients to rank - 1.

    The two directions have a communicator each. On NCCL a message waits for those that were posted
    before it on the same one, and two neighbours that both send first would wait for ever.
    """

    def __init__(self, comm: Communicator) -> None:
        self.forward_comm, self.backward_comm = comm, comm.fork()
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # input and output until backward

    def run(
        self, actions: Sequence[Action], forward: Forward, inputs: Sequence[Tensor], like: Tensor
    ) -> None:
        """Run all actions of this rank, or some now and the others in a later call."""
        rank, last = self.forward_comm.rank, self.forward_comm.size - 1
        sent: list[Request] = []
        for kind, microbatch in actions:
            if kind == "F":
                x = inputs[microbatch]
                if rank > 0:
                    x = receive(like, self.forward_comm, rank - 1).requires_grad_()
                y = forward(x, microbatch)
                if rank < last:
                    output = y.detach().contiguous()
                    sent.append(self.forward_comm.isend(output, rank + 1))
                self.held[microbatch] = x, y
            else:
                x, y = self.held.pop(microbatch)
                gradient = receive(like, self.backward_comm, rank + 1) if rank < last else None
                torch.autograd.backward(y, gradient)
                if rank > 0 and x.grad is not None:
                    sent.append(self.backward_comm.isend(x.grad, rank - 1))
        for request in sent:
            request.wait()
