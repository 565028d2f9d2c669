"""Training in 16 bits: a copy of the weights in float32, and a scale for small gradients.

    16 bits    weights ─▶ forward, backward of loss * scale ─▶ gradients ──┐ / scale
    float32    masters ◀──────── optimizer.step ◀──────────────────────────┘
    16 bits    weights ◀─ rounded masters

Why masters? An update is often smaller than half the distance between two 16-bit numbers: added to
a 16-bit weight it would be rounded away, step after step. Why a scale? Below 6e-8 float16 knows only
zero, and many gradients are smaller. If a scaled gradient overflows, the step is skipped, on all
ranks or on none, and the scale is halved; after many good steps it is doubled. bfloat16 has the
range of float32 and needs no scale. (Micikevicius et al. 2018, sections 3.1 and 3.2.)

Cost: 4 bytes a parameter for the masters, which ZeRO divides among ranks as all optimizer state;
an all-reduce of one number a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from minidist.collectives import all_reduce
from minidist.comm import Communicator

GROWTH_INTERVAL = 1000  # good steps before the scale is doubled


class MixedPrecision:
    """An optimizer of float32 masters, for tensors of any dtype; float32 and wider need no masters.

    mixed = MixedPrecision(model.trained, make_optimizer, comm)
    (loss * mixed.scale).backward()
    mixed.step()                        False: it was skipped

    `trained` are parameters, or shards of them; `make_optimizer` makes the optimizer of a list of
    tensors; `comm` are all ranks of the job, which skip a step together.
    """

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        comm: Communicator,
    ) -> None:
        self.trained, self.comm = list(trained), comm
        self.masters = [as_master(each) for each in self.trained]
        self.optimizer = make_optimizer(self.masters)
        scaled = any(each.dtype == torch.float16 for each in self.trained)
        self.scale = 2.0**16 if scaled else 1.0
        self.good_steps = 0

    @torch.no_grad()
    def step(self) -> bool:
        """Update masters and weights, and forget the gradients. Collective.

        Return False if some rank has a gradient that is not finite: nothing is updated then.
        """
        finite = torch.ones(1)
        for weight, master in zip(self.trained, self.masters, strict=True):
            gradient, weight.grad = weight.grad, None
            if gradient is not None:
                master.grad = gradient.to(master.dtype) / self.scale
                finite *= bool(master.grad.isfinite().all())
        all_reduce(finite, self.comm, "min")
        if finite:
            self.optimizer.step()
            self.publish()
        elif self.scale == 1:
            raise FloatingPointError("a gradient is not finite: try a lower learning rate")
        self.optimizer.zero_grad()
        self.adapt(bool(finite))
        return bool(finite)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights."""
        for weight, master in zip(self.trained, self.masters, strict=True):
            if weight is not master:
                weight.copy_(master)

    def adapt(self, finite: bool) -> None:
        """Halve the scale after an overflow; double it after many good steps."""
        self.good_steps += 1
        if self.scale > 1 and not finite:
            self.scale /= 2
            self.good_steps = 0
        elif self.scale > 1 and self.good_steps == GROWTH_INTERVAL:
            self.scale *= 2
            self.good_steps = 0


def as_master(weight: nn.Parameter) -> nn.Parameter:
    """Return a copy in float32, or the weight itself if it is as precise."""
    if torch.finfo(weight.dtype).bits >= 32:
        return weight
    return nn.Parameter(weight.detach().float())
