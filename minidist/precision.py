"""Training in 16 bits: a copy of the weights in float32, and a scale for small gradients.

    16 bits    weights ─▶ forward, backward of loss * scale ─▶ gradients ──┐ / scale
    float32    masters ◀──────── optimizer.step ◀──────────────────────────┘
    16 bits    weights ◀─ rounded masters

Why masters? An update is often smaller than half the distance between two 16-bit numbers: added to
a 16-bit weight it would be rounded away, step after step. Why a scale? Below 6e-8 float16 knows only
zero, and many gradients are smaller. If a scaled gradient overflows, all ranks skip the step, and the
scale is halved; after many good steps it is doubled. bfloat16 has the range of float32 and needs no
scale. Cost: 4 bytes a parameter for the masters, which ZeRO divides; an all-reduce of one number a
step. (Micikevicius et al. 2018, sections 3.1 and 3.2.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce
from minidist.comm import Communicator

GROWTH_INTERVAL = 1000  # good steps before the scale is doubled


class MixedPrecision:
    """AdamW on masters; `trained` are weights, or shards of them, and `comm` are all ranks.

    mixed = MixedPrecision(model.trained, lr, comm)
    (loss * mixed.scale).backward()
    mixed.step()                        False: it was skipped
    """

    def __init__(self, trained: Sequence[nn.Parameter], lr: float, comm: Communicator) -> None:
        self.comm = comm
        self.master_of = {weight: as_master(weight) for weight in trained}
        self.optimizer = torch.optim.AdamW(self.master_of.values(), lr)
        self.tensors_of: dict[nn.Parameter, dict[str, Tensor]] = {}
        for weight, master in self.master_of.items():
            # AdamW makes its state at its first step. It is here now, for a checkpoint to fill.
            mean, square = torch.zeros_like(master), torch.zeros_like(master)
            state = {"step": torch.tensor(0.0), "exp_avg": mean, "exp_avg_sq": square}
            self.optimizer.state[master] = state
            self.tensors_of[weight] = {"": master.detach(), "/mean": mean, "/square": square}
        scaled = any(weight.dtype == torch.float16 for weight in trained)
        self.scale = 2.0**16 if scaled else 1.0
        self.good_steps = self.updates = 0

    @torch.no_grad()
    def step(self) -> bool:
        """Update masters and weights, or return False if a rank has a gradient that is not finite."""
        finite = torch.ones(1)
        for weight, master in self.master_of.items():
            gradient, weight.grad = weight.grad, None
            if gradient is not None:
                master.grad = gradient.to(master.dtype) / self.scale
                finite *= bool(master.grad.isfinite().all())
        all_reduce(finite, self.comm, "min")
        if finite:
            self.optimizer.step()
            self.updates += 1
            self.publish()
        elif self.scale == 1:
            raise FloatingPointError("a gradient is not finite: try a lower learning rate")
        self.optimizer.zero_grad()
        self.adapt(bool(finite))
        return bool(finite)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights."""
        for weight, master in self.master_of.items():
            if weight is not master:
                weight.copy_(master)

    def adapt(self, finite: bool) -> None:
        """Halve the scale after an overflow; double it after many good steps."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if self.scale > 1 and not finite:
            self.scale /= 2
        elif self.scale > 1 and self.good_steps == GROWTH_INTERVAL:
            self.scale *= 2
            self.good_steps = 0

    def counts(self) -> dict[str, float]:
        """Return what a checkpoint has to hold in addition to `tensors_of`."""
        return {"scale": self.scale, "good_steps": self.good_steps, "updates": self.updates}

    def restore(self, counts: Mapping[str, Any]) -> None:
        """Go on with counts of a checkpoint, from which `tensors_of` have been filled."""
        self.scale, self.good_steps = counts["scale"], counts["good_steps"]
        self.updates = counts["updates"]
        for state in self.optimizer.state.values():
            state["step"].fill_(self.updates)
        self.publish()


def as_master(weight: nn.Parameter) -> nn.Parameter:
    """Return a copy in float32; float32 and wider weights are their own masters."""
    if torch.finfo(weight.dtype).bits >= 32:
        return weight
    return nn.Parameter(weight.detach().float())
