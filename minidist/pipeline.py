"""A pipeline: each rank has some of the layers, and microbatches pass through them.

    rank 0    F0 F1 F2 F3          B0    B1    B2    B3        1F1B, 4 stages, 4 microbatches;
    rank 1       F0 F1 F2       B0 F3 B1    B2    B3           a backward takes twice a forward
    rank 2          F0 F1    B0 F2 B1 F3 B2    B3
    rank 3             F0 B0 F1 B1 F2 B2 F3 B3

Rank r has stage r of P. GPipe runs all forwards, then all backwards, and so holds the activations
of all m microbatches. 1F1B begins with one forward for each rank behind this one; then a backward
follows each forward, so a rank never holds more than P - r microbatches. Both leave a rank idle for
(P - 1)/m of the time that it computes, the *bubble*. Cost: between two neighbours 2 messages for
each microbatch, an output and a gradient.

This page has 1F1B by hand, as one rank does it; then schedules as data, which can be checked and
drawn before anything runs, and one loop that runs them all. (Huang et al. 2019, "GPipe"; Narayanan
et al. 2019, "PipeDream", section 3.2; with a flush after each step: Narayanan et al. 2021.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce
from minidist.comm import Communicator, Request
from minidist.model import GPT, rotary_table

# ---------------------------------------------------------------- the idea: 1F1B by hand


def one_forward_one_backward(
    stage: Callable[[Tensor], Tensor],
    comm: Communicator,
    inputs: Sequence[Tensor],
    targets: Sequence[Any],
    loss: Callable[[Tensor, Any], Tensor],
    carried: Callable[[], Tensor],
) -> float:
    """Take one step; return the sum of the microbatches' losses on the last rank, else 0.

    Collective. Gradients are added to `parameter.grad`. Only the first rank reads `inputs`, only
    the last one `targets`. `carried()` is an empty tensor of what goes from rank to rank.

    Every send waits for its receive. Two neighbours may have something for each other at the same
    time, one an output, the other a gradient. If both sent first, both would wait for ever:
    therefore they exchange.
    """
    count, first, last = len(inputs), comm.rank == 0, comm.rank == comm.size - 1
    before, after = comm.rank - 1, comm.rank + 1
    held: deque[tuple[Tensor, Tensor]] = deque()  # what waits for its backward
    total = 0.0

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
        torch.autograd.backward(y, None if last else gradient)
        return x if x.grad is None else x.grad  # tokens have none, and the first rank sends none

    def receive(peer: int) -> Tensor:
        room = carried()
        comm.recv(room, peer)
        return room

    def exchange(leaving: Tensor, peer: int) -> Tensor:
        room = carried()
        comm.exchange(leaving, peer, room, peer)
        return room

    def start(microbatch: int) -> Tensor:
        return inputs[microbatch] if first else receive(before).requires_grad_()

    warm_up = min(comm.size - 1 - comm.rank, count)
    for microbatch in range(warm_up):
        y = forward(microbatch, start(microbatch))
        comm.send(y, after)
    x = start(warm_up) if warm_up < count else torch.empty(0)
    for microbatch in range(warm_up, count):
        y = forward(microbatch, x)
        gradient = backward(y if last else exchange(y, after))
        if microbatch + 1 == count:
            if not first:
                comm.send(gradient, before)
        else:
            x = inputs[microbatch + 1] if first else exchange(gradient, before).requires_grad_()
    for _ in range(warm_up):
        gradient = backward(receive(after))
        if not first:
            comm.send(gradient, before)
    return total


# ---------------------------------------------------------------- schedules as data


class Action(NamedTuple):
    """A forward ("F") or a backward ("B") of a microbatch."""

    kind: str
    microbatch: int


Schedule: TypeAlias = list[list[Action]]
"""The actions of each rank, in order."""

SECONDS = {"F": 1, "B": 2}  # of an action, in units of a forward


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    forwards = [Action("F", microbatch) for microbatch in range(microbatches)]
    backwards = [Action("B", microbatch) for microbatch in range(microbatches)]
    return [forwards + backwards for _ in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """A warm-up of one forward for each rank behind; then one backward after each forward."""
    schedule = []
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, microbatches)
        actions = [Action("F", microbatch) for microbatch in range(warm_up)]
        for microbatch in range(microbatches - warm_up):
            actions += [Action("F", warm_up + microbatch), Action("B", microbatch)]
        tail = range(microbatches - warm_up, microbatches)
        schedule.append(actions + [Action("B", microbatch) for microbatch in tail])
    return schedule


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def check(schedule: Schedule) -> list[dict[Action, int]]:
    """Return when each action begins, by rank, in units of a forward.

    A forward needs the same microbatch's forward on the rank before; a backward needs its own
    forward, and the backward on the rank behind.

    Raises
    ------
    ValueError
        If an action can never begin, or the ranks do not run the same actions.
    """
    if len({frozenset(actions) for actions in schedule}) > 1:
        raise ValueError("all ranks must run the same microbatches, forward and backward")
    begun: list[dict[Action, int]] = [{} for _ in schedule]
    free = [0] * len(schedule)  # when each rank has finished what it has begun
    waiting = {rank: deque(actions) for rank, actions in enumerate(schedule) if actions}
    while waiting:
        able = [
            rank for rank in waiting if needs(schedule, rank, waiting[rank][0], begun) is not None
        ]
        if not able:
            stuck = [f"rank {rank} at {show(left[0])}" for rank, left in waiting.items()]
            raise ValueError(f"the schedule cannot go on: {', '.join(stuck)}")
        for rank in able:
            action = waiting[rank].popleft()
            ready = needs(schedule, rank, action, begun) or 0
            begun[rank][action] = max(free[rank], ready)
            free[rank] = begun[rank][action] + SECONDS[action.kind]
        waiting = {rank: left for rank, left in waiting.items() if left}
    return begun


def needs(
    schedule: Schedule, rank: int, action: Action, begun: list[dict[Action, int]]
) -> int | None:
    """Return when all that an action needs is done; None if some of it has not even begun."""
    forward = Action("F", action.microbatch)
    wanted = [(rank - 1, forward)] if action.kind == "F" else [(rank, forward), (rank + 1, action)]
    ready = 0
    for where, what in wanted:
        if 0 <= where < len(schedule):
            if what not in begun[where]:
                return None
            ready = max(ready, begun[where][what] + SECONDS[what.kind])
    return ready


def show(action: Action) -> str:
    """Return an action as it is drawn, such as F2."""
    return f"{action.kind}{action.microbatch}"


def bubble(schedule: Schedule) -> float:
    """Return which share of the step a rank is idle, in the mean: (P - 1)/(m + P - 1) for 1F1B."""
    begun = check(schedule)
    end = max(start + SECONDS[action.kind] for rank in begun for action, start in rank.items())
    busy = sum(SECONDS[action.kind] for rank in begun for action in rank)
    return 1 - busy / (end * len(schedule))


def in_flight(schedule: Schedule) -> list[int]:
    """Return for how many microbatches each rank holds activations at most."""
    most = []
    for actions in schedule:
        held = np.cumsum([1 if action.kind == "F" else -1 for action in actions])
        most.append(int(held.max(initial=0)))
    return most


def draw(schedule: Schedule) -> str:
    """Return a line for each rank, with three characters for a unit of time."""
    lines = []
    for rank, begun in enumerate(check(schedule)):
        line = f"rank {rank}    "
        margin = len(line)
        for action, start in begun.items():
            line = line.ljust(margin + 3 * start) + show(action).ljust(3)
        lines.append(line.rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------- a model, and a step


class Stage(nn.Module):
    """The layers of a GPT that this rank has, under the names that they have in the whole model.

    The first rank has the embedding, too, and the last one the norm and the head.
    """

    def __init__(self, model: GPT, comm: Communicator) -> None:
        super().__init__()
        self.config, self.comm = model.config, comm
        self.first, self.last = comm.rank == 0, comm.rank == comm.size - 1
        own = np.array_split(range(model.config.layers), comm.size)[comm.rank].tolist()
        self.layers = nn.ModuleDict({str(index): model.layers[index] for index in own})
        self.embedding = model.embedding if self.first else None
        self.norm = model.norm if self.last else None
        self.head = model.head if self.last else None
        # A tied matrix is on two ranks, the first and the last: they have to sum its gradients.
        self.ends = comm.split(0 if self.first or self.last else 1)
        self.ends.traffic = comm.traffic

    def forward(self, x: Tensor, first: int, time: int) -> Tensor:
        """Map tokens, or what the rank before returned, to the next rank's input, or to logits.

        `first` is the position of the first of `time` tokens.
        """
        if self.embedding is not None:
            x = self.embedding(x)
        rotary = rotary_table(self.config, first, time, x)
        for layer in self.layers.values():
            x = layer(x, rotary)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def sum_tied_gradients(self) -> None:
        """Give both copies of a tied matrix the gradient of both, after backward. Collective."""
        if self.config.tied and self.comm.size > 1 and (self.first or self.last):
            name = "embedding.weight" if self.first else "head.weight"
            gradient = self.get_parameter(name).grad
            assert gradient is not None
            all_reduce(gradient, self.ends)


class Pipeline:
    """Runs any schedule: forwards send outputs behind, backwards send gradients ahead.

    The two directions have a communicator each. On NCCL a message waits for those that were posted
    before it on the same one, and two neighbours that both send first would wait for ever.
    """

    def __init__(self, comm: Communicator) -> None:
        self.behind, self.ahead = comm, comm.fork()

    def run(
        self,
        actions: Sequence[Action],
        stage: Callable[[Tensor], Tensor],
        inputs: Sequence[Tensor],
        targets: Sequence[Any],
        loss: Callable[[Tensor, Any], Tensor],
        carried: Callable[[], Tensor],
    ) -> float:
        """Take one step; parameters and result are those of `one_forward_one_backward`."""
        rank, last = self.behind.rank, self.behind.size - 1
        held: dict[int, tuple[Tensor, Tensor]] = {}
        sent: list[tuple[Request, Tensor]] = []  # with the tensor: it must live until it has left
        total = 0.0
        for kind, microbatch in actions:
            if kind == "F":
                x = inputs[microbatch]
                if rank > 0:
                    x = carried()
                    self.behind.recv(x, rank - 1)
                    x.requires_grad_()
                y = stage(x)
                if rank == last:
                    y = loss(y, targets[microbatch])
                    total += float(y.detach())
                else:
                    output = y.detach().contiguous()
                    sent.append((self.behind.isend(output, rank + 1), output))
                held[microbatch] = x, y
            else:
                x, y = held.pop(microbatch)
                gradient = None
                if rank < last:
                    gradient = carried()
                    self.ahead.recv(gradient, rank + 1)
                torch.autograd.backward(y, gradient)
                if rank > 0 and x.grad is not None:
                    sent.append((self.ahead.isend(x.grad, rank - 1), x.grad))
        for request, _ in sent:
            request.wait()
        return total
