"""Local steps on a page: each site trains alone for H steps, then all take one outer step together.

    site 0    x ─ step ─ step ─ ... ─ step ─▶ x0 ─┐  mean of x - x0, x - x1 ─▶ outer step ─▶ x, again
    site 1    x ─ step ─ step ─ ... ─ step ─▶ x1 ─┘

What a site has subtracted from the parameters in H steps, x - x0, is taken for a gradient: its sign
is that of a gradient, before minus after. The mean over sites goes to an outer optimizer, SGD with
Nesterov momentum, which moves x; every site then goes on from there. The inner optimizers keep their
moments, each its own.

    lr 1, momentum 0             x becomes the mean of the sites: local SGD, or federated averaging
    lr 0.7, momentum 0.9         DiLoCo
    H = 1, lr 1, momentum 0,     with plain SGD inside: data parallelism, to rounding
    one site                     Lookahead

Cost: each site sends 2 (P - 1)/P n bytes every H steps, data parallelism every step. Memory: the
parameters that all sites share, and the momentum, 2 n bytes. (Stich 2019; McMahan et al. 2017; Zhang
et al. 2019, Lookahead; Douillard et al. 2023, DiLoCo, algorithm 1.)
"""

from collections.abc import Iterable

import torch
from torch import nn

from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator


class PlainDiLoCo:
    """The outer optimizer of a model that is the same on all sites when this is made.

    Call `stepped` after each step of the inner optimizer.

    Parameters
    ----------
    parameters
        All that the inner optimizer updates.
    comm : Communicator
        The sites.
    every : int
        H, steps between two meetings.
    lr, momentum : float
        Of the outer optimizer.
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
        """Count a step of the inner optimizer; after every H of them, meet. Collective then."""
        self.steps += 1
        if self.steps % self.every:
            return
        for parameter, shared, velocity in zip(
            self.parameters, self.shared, self.velocity, strict=True
        ):
            change = shared - parameter  # what this site's steps have subtracted
            all_reduce(change, self.comm, "mean")
            velocity.mul_(self.momentum).add_(change)
            shared -= self.lr * (change + self.momentum * velocity)  # Nesterov, as torch's SGD
            parameter.copy_(shared)
