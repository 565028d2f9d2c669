"""Slow wires: fewer bytes, fewer meetings, or old gradients; three ideas, each with its price.

    top-k       each rank sends its largest elements, and keeps the others for later
    DiLoCo      each site trains alone for H steps, then all take one outer step together
    stale       a part of the model learns from what it was some updates ago: nobody waits

Bytes that a rank sends in a step, for n elements of `itemsize` bytes on P ranks, where data
parallelism sends 2 (P - 1)/P n itemsize: top-k (P - 1) k (4 + itemsize); DiLoCo the bytes of data
parallelism every H steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.collectives import all_gather, all_reduce
from minidist.comm import Communicator

# ---------------------------------------------------------------- top-k with error feedback


@torch.no_grad()
def sparse_all_reduce(gradient: Tensor, residual: Tensor, k: int, comm: Communicator) -> None:
    """Replace a flat gradient [n] by the sum of what all ranks send of it. Collective.

        residual    += gradient
        chosen       the k elements of `residual` that are largest in size
        sent         their places and values; in `residual` they become 0
        gradient     the sum of what all ranks have sent

    After t steps, summed over ranks: sent so far + residual = all gradients so far. An element that
    is never large enough alone is sent once enough of it has come together; without the residual it
    would be lost, and training would stop where the small elements lead. `residual` [n] is zeros at
    first. (Stich et al. 2018, "Sparsified SGD with memory"; Aji & Heafield 2017.)
    """
    residual += gradient
    chosen = residual.abs().topk(k).indices
    values = residual[chosen]
    residual[chosen] = 0
    places = all_gather(chosen.to(torch.int32), comm)  # [P k], rank by rank
    addends = all_gather(values, comm)
    gradient.zero_()
    gradient.index_add_(0, places.long(), addends)


# ---------------------------------------------------------------- local steps


class DiLoCo:
    """The outer optimizer of sites that start equal; call `stepped` after each inner step.

        site 0    x ─ step ─ step ─ ... ─ step ─▶ x0 ─┐  mean of x - x0, x - x1 ─▶ outer step ─▶ x, again
        site 1    x ─ step ─ step ─ ... ─ step ─▶ x1 ─┘

    What a site has subtracted from the parameters in H steps, x - x0, is taken for a gradient. The
    mean over sites goes to SGD with Nesterov momentum, which moves x. Inner optimizers keep their
    own moments. With lr 1 and momentum 0, x becomes the mean of the sites (federated averaging).
    Memory: x and the momentum. (Douillard et al. 2023, DiLoCo, algorithm 1; McMahan et al. 2017.)
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        comm: Communicator,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        self.parameters, self.comm = list(parameters), comm
        self.every, self.lr, self.momentum = every, lr, momentum
        self.steps = 0
        self.shared = [parameter.detach().clone() for parameter in self.parameters]
        self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def stepped(self) -> None:
        """Count an inner step; after every H of them, take the outer step. Collective then."""
        self.steps += 1
        if self.steps % self.every:
            return
        states = zip(self.parameters, self.shared, self.velocity, strict=True)
        for parameter, shared, velocity in states:
            change = shared - parameter  # what this site's steps have subtracted
            all_reduce(change, self.comm, "mean")
            velocity.mul_(self.momentum).add_(change)
            shared -= self.lr * (change + self.momentum * velocity)  # Nesterov, as torch's SGD
            parameter.copy_(shared)


# ---------------------------------------------------------------- stale gradients


def train_delayed(
    parts: Sequence[nn.Module],
    delays: Sequence[int],
    batches: Sequence[Any],
    loss_of: Callable[[Any], Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[float]:
    """Train the parts of a model, each with gradients of weights that are old; return the losses.

        x(t + 1) = x(t) - lr g(x(t - d + 1))        d = 1: the gradient of the weights themselves

        pipeline of p stages that never drains      PipeDream: d(s) = p - s for stage s; 2BW: d = 2
        parameter server, stale by s                d = s + 1

    A small step forgives this: weights that changed little have nearly the same gradient. A large
    one does not: on a parabola of curvature c, plain SGD diverges from lr c = 2 on, and with d = 2
    from 1 on. (Narayanan et al. 2019, PipeDream, section 3.3; 2021, 2BW, section 3.1.)

    Parameters
    ----------
    parts, delays, optimizers
        Of each part: the module, d, and what updates it.
    batches, loss_of
        `loss_of(batch)` runs all parts, and returns a scalar.
    """
    versions = [[values(part)] for part in parts]  # after 0, 1, 2 ... updates
    losses = []
    for step, batch in enumerate(batches):
        for part, delay, past in zip(parts, delays, versions, strict=True):
            become(part, past[max(0, step - delay + 1)])
        loss = loss_of(batch)
        torch.autograd.backward(loss)
        for part, past, optimizer in zip(parts, versions, optimizers, strict=True):
            become(part, past[-1])
            optimizer.step()
            optimizer.zero_grad()
            past.append(values(part))
        losses.append(float(loss.detach()))
    return losses


def values(part: nn.Module) -> list[Tensor]:
    """Return a copy of the parameters."""
    return [parameter.detach().clone() for parameter in part.parameters()]


@torch.no_grad()
def become(part: nn.Module, wanted: Sequence[Tensor]) -> None:
    """Give a module these parameters."""
    for parameter, value in zip(part.parameters(), wanted, strict=True):
        parameter.copy_(value)
