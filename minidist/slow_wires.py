"""Slow wires: fewer bytes, fewer meetings, or old gradients; three ideas, each with its price.

    top-k       each rank sends its largest elements, and keeps the others for later
    DiLoCo      each site trains alone for H steps, then all take one outer step together
    stale       a part of the model learns from what it was some updates ago: nobody waits

Data parallelism sends 2 (P - 1)/P n elements in a step; top-k sends (P - 1) k elements and places;
DiLoCo as much as data parallelism, every H steps.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.collectives import all_gather, all_reduce
from minidist.comm import Communicator


@torch.no_grad()
def sparse_all_reduce(gradient: Tensor, residual: Tensor, k: int, comm: Communicator) -> None:
    """Replace a flat gradient [n] by the sum of what all ranks send of it. Collective.

    `residual` [n], zeros at first, holds what was not sent: an element that is never among the largest
    is sent once enough of it has come together. Without it, training would stop where the small
    elements lead. (Stich et al. 2018, "Sparsified SGD with memory"; Aji & Heafield 2017.)
    """
    residual += gradient
    chosen = residual.abs().topk(k).indices
    values = residual[chosen]
    residual[chosen] = 0  # Now the residual is what has not been sent yet.
    places = all_gather(chosen.to(torch.int32), comm)  # [P k], rank by rank
    addends = all_gather(values, comm)
    gradient.zero_()
    gradient.index_add_(0, places.long(), addends)


class DiLoCo:
    """The outer optimizer of sites that start equal; call `stepped` after each inner step.

        site 0    x ─ step ─ step ─ ... ─ step ─▶ x0 ─┐  mean of x - x0, x - x1 ─▶ outer step ─▶ x, again
        site 1    x ─ step ─ step ─ ... ─ step ─▶ x1 ─┘

    A site's change in `every` steps is taken for a gradient. The mean over sites goes to SGD with
    Nesterov momentum. With lr 1 and momentum 0, x becomes the mean of the sites, which is federated
    averaging. (Douillard et al. 2023, DiLoCo, algorithm 1; McMahan et al. 2017.)
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        comm: Communicator,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        self.parameters, self.comm, self.every = list(parameters), comm, every
        self.shared = [each.detach().clone() for each in self.parameters]
        self.outer = torch.optim.SGD(self.shared, lr, momentum, nesterov=momentum > 0)
        self.steps = 0

    @torch.no_grad()
    def stepped(self) -> None:
        """Count an inner step; after every H of them, take the outer step. Collective then."""
        self.steps += 1
        if self.steps % self.every:
            return
        for parameter, shared in zip(self.parameters, self.shared, strict=True):
            shared.grad = shared - parameter
            all_reduce(shared.grad, self.comm, "mean")
        self.outer.step()
        for parameter, shared in zip(self.parameters, self.shared, strict=True):
            parameter.copy_(shared)


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

    Each part has its d in `delays`, and its optimizer. A small step forgives this: weights that changed
    little have nearly the same gradient. A large one does not: on a parabola of curvature c, plain SGD
    diverges from lr c = 2 on, and with d = 2 from 1 on. (Narayanan et al. 2019, PipeDream, section 3.3.)
    """
    versions = []  # the weights of the last d steps, oldest first
    for part, delay in zip(parts, delays, strict=True):
        versions.append(deque([values(part)], maxlen=delay))
    losses = []
    for batch in batches:
        for part, past in zip(parts, versions, strict=True):
            become(part, past[0])
        loss = loss_of(batch)
        torch.autograd.backward(loss)
        # Now the gradients are those of old weights; the newest ones are updated.
        for part, past, optimizer in zip(parts, versions, optimizers, strict=True):
            become(part, past[-1])
            optimizer.step()
            optimizer.zero_grad()
            past.append(values(part))
        losses.append(loss.item())
    return losses


def values(part: nn.Module) -> list[Tensor]:
    """Return a copy of the parameters."""
    return [parameter.detach().clone() for parameter in part.parameters()]


@torch.no_grad()
def become(part: nn.Module, wanted: Sequence[Tensor]) -> None:
    """Give a module these parameters."""
    for parameter, value in zip(part.parameters(), wanted, strict=True):
        parameter.copy_(value)
