"""Delayed gradients on a page: each part of a model learns from what it was some updates ago.

    x(t + 1) = x(t) - lr g(x(t - d + 1))        d = 1: the gradient of the weights themselves

Part s of a model has a delay of its own, d(s). The gradient of batch t is then that of the whole
model in which part s has the weights x(s) after max(0, t - d(s) + 1) updates.

    pipeline of p stages      PipeDream               d(s) = p - s: the first stage waits longest for its gradient
                              vertical sync           d(s) = p: all stages use the version of the first
                              2BW                     d(s) = 2, from a batch to the next
                              with a flush            d(s) = 1
    server, stale by s        every parameter         d = s + 1

A small step forgives this: weights that changed little have nearly the same gradient. A large one
does not: on a parabola of curvature c, plain SGD diverges from lr c = 2 on, and with d = 2 from 1 on.
(Narayanan et al. 2019, PipeDream, section 3.3; Narayanan et al. 2021, 2BW, section 3.1.)

Cost: max(d) copies of the weights.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def train_delayed(
    parts: Sequence[nn.Module],
    delays: Sequence[int],
    batches: Sequence[Any],
    loss_of: Callable[[Any], Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[float]:
    """Train the parts of a model, each with gradients of weights that are `delays` updates old.

    Parameters
    ----------
    parts, delays, optimizers
        Of each part: the module, d(s), and what updates it.
    batches, loss_of
        `loss_of(batch)` runs all parts, and returns a scalar.

    Return the losses, which are those of the old weights, too.
    """
    versions = [[_values(part)] for part in parts]  # after 0, 1, 2 ... updates
    losses = []
    for step, batch in enumerate(batches):
        for part, delay, past in zip(parts, delays, versions, strict=True):
            _become(part, past[max(0, step - delay + 1)])
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for part, past, optimizer in zip(parts, versions, optimizers, strict=True):
            _become(part, past[-1])
            optimizer.step()
            optimizer.zero_grad()
            past.append(_values(part))
        losses.append(float(loss.detach()))
    return losses


def _values(part: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in part.parameters()]


@torch.no_grad()
def _become(part: nn.Module, values: Sequence[Tensor]) -> None:
    for parameter, value in zip(part.parameters(), values, strict=True):
        parameter.copy_(value)
