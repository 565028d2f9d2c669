"""Mixed precision: compute in 16 bits, and keep master weights in 32.

               bits  largest  smallest  next to 1     what fails                      the remedy
    float32     32    3e38     1e-45    1 + 1e-7
    bfloat16    16    3e38     9e-41    1 + 1/128     1 + 0.003 = 1: updates vanish   MasterWeights
    float16     16    65504    6e-8     1 + 1/1024    1e-8 = 0: gradients vanish      LossScaler, with MasterWeights

    model, 16 bits     weights ─▶ forward ─▶ loss * scale ─▶ backward ─▶ gradients * scale
                          ▲                                                  │ upcast, / scale, clipped
    masters, 32 bits      └────── round ◀────── step (not after an overflow) ┘

`model.to(torch.bfloat16)` makes the model of the upper line. The norms and the loss of
`minidist.full.model` compute in float32 by themselves. With AdamW a parameter then costs 16 bytes: 2 for
the weight, 2 for its gradient, 12 for the master and its two moments. (Micikevicius et al. 2018.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPUTE_DTYPES = (*FLOAT8, torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(eq=False)
class LossScaler:
    """Multiply the loss so that float16 gradients do not underflow, and adapt the scale during
    training.

    Parameters
    ----------
    comm : Communicator, optional
        All ranks that hold a part of the model or of the batch. An overflow on one makes all of
        them skip the step.
    scale, growth, backoff, interval
        The scale starts at `scale`. It is multiplied by `growth` after `interval` good steps, and
        by `backoff` after an overflow. Powers of two are exact. `growth=1, backoff=1` keeps the
        scale constant.
    smallest : float
        An overflow at this scale is an error, because the scale cannot be its cause.

    Raises
    ------
    ValueError
        If a number is out of its range.
    """

    comm: Communicator | None = field(default=None, repr=False)
    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    smallest: float = 1.0
    good_steps: int = field(default=0, init=False, repr=False)  # since the scale last changed

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        in_range = self.growth >= 1 >= self.backoff > 0 and self.interval >= 1
        if not (in_range and math.inf > self.scale >= self.smallest > 0):
            needs = "scale >= smallest > 0, growth >= 1, 0 < backoff <= 1 and interval >= 1"
            raise ValueError(f"{self} cannot be: it needs {needs}")

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, to call `backward` on."""
        return loss * self.scale

    def overflowed(self, norm: Tensor) -> bool:
        """Tell whether the norm of the gradients, a scalar, is infinite or not a number on any
        rank.

        Collective: one all-reduce of one byte. All ranks get the same answer, so they skip the step
        together. In float32 the norm of float16 gradients is infinite only if an element is. On the
        device `meta` nothing overflows.
        """
        meta = norm.device.type == "meta"
        overflow = (
            torch.zeros(1, dtype=torch.uint8)
            if meta
            else (~norm.isfinite()).to(torch.uint8).view(1)
        )
        if self.comm is not None:
            all_reduce(overflow, self.comm, op="max")
        return bool(overflow)

    def update(self, overflow: bool) -> None:
        """Choose the scale of the next step, given whether this one overflowed.

        Raises
        ------
        FloatingPointError
            If the smallest scale overflows.
        """
        if not overflow:
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.scale, self.good_steps = self.scale * self.growth, 0
            return
        if self.scale == self.smallest and self.backoff < 1:
            fault = f"gradients are infinite or not a number even at loss scale {self.scale:g}"
            raise FloatingPointError(
                f"{fault}: lower the learning rate, or train in bfloat16, which has a wider range"
            )
        self.scale, self.good_steps = max(self.scale * self.backoff, self.smallest), 0

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the state in a checkpoint."""
        self.scale, self.good_steps = state["scale"], int(state["good_steps"])


def check_finite(norm: Tensor, before: Callable[[], object] | None = None) -> None:
    """Raise FloatingPointError if the norm of gradients whose loss is not scaled is infinite or not
    a number: a step would make every parameter so, and checkpoints would follow. `before` is called
    first: a checkpoint may be on its way.
    """
    if not math.isfinite(value := float(norm)):
        if before is not None:
            before()
        raise FloatingPointError(
            f"the norm of the gradients is {value}, and a step would spoil every parameter: go on "
            "from the last checkpoint with a lower --lr, or with --clip"
        )


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether a device can multiply matrices of a dtype. A CPU emulates float8; a GPU needs
    hardware for it.
    """
    if dtype not in COMPUTE_DTYPES:
        return False
    if device.type == "cuda":
        needed = (0, 0)
        if dtype in FLOAT8:
            needed = (8, 9)
        elif dtype == torch.bfloat16:
            needed = (8, 0)
        return torch.cuda.get_device_capability(device) >= needed
    return device.type != "mps" or dtype.itemsize in (2, 4)


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError, naming the dtypes that work, if a device cannot compute in this one."""
    if not supports(dtype, device):
        can = ", ".join(
            str(other).removeprefix("torch.") for other in COMPUTE_DTYPES if supports(other, device)
        )
        name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"the device {device}"
        )
        raise ValueError(
            f"{name} cannot compute in {str(dtype).removeprefix('torch.')}: use one of {can}"
        )
