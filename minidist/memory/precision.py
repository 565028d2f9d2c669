"""Mixed precision: compute in 16 bits, remember in 32.

               bits  largest  smallest  next to 1     what fails                      what mends it
    float32     32    3e38     1e-45    1 + 1e-7
    bfloat16    16    3e38     9e-41    1 + 1/128     1 + 0.003 = 1: updates vanish   MasterWeights
    float16     16    65504    6e-8     1 + 1/1024    1e-8 = 0: gradients vanish      LossScaler, with MasterWeights

    model, 16 bits     weights ─▶ forward ─▶ loss * scale ─▶ backward ─▶ gradients * scale
                          ▲                                                  │ upcast
    masters, 32 bits      └── round ◀── step (not after overflow) ◀── clip ◀── / scale

`model.to(torch.bfloat16)` makes the model of the upper line: the norms of `minidist.model` compute in float32 by
themselves, and so does its loss. A parameter then costs AdamW 16 bytes: 2 for the weight, 2 for its gradient, 12 for
the master and its two moments; while it steps, 4 more for the gradient in float32. (Micikevicius et al. 2018.)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce
from minidist.comm import Communicator
from minidist.memory.rounding import stochastic_round

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPUTE_DTYPES = (*FLOAT8, torch.bfloat16, torch.float16, torch.float32, torch.float64)


class MasterWeights(torch.optim.Optimizer):
    """A torch optimizer that steps on float32 copies of the parameters: the masters.

    Parameters
    ----------
    params : iterable
        Parameters or groups of them, as for every torch optimizer. Those of `dtype` or wider are their own masters.
    optimizer : type
        What steps on the masters; `options` are passed on to it.
    dtype : torch.dtype
        Of the masters.
    rounding : torch.Generator, optional
        Round bfloat16 parameters stochastically. Seed it alike on ranks that hold the same parameters.

    A master is read off its parameter when the first gradient comes: a frozen parameter has none, and what a strategy
    does to the model before the first step counts. After loading other weights into the model later, build it anew.

    Gradients can be looked at in float32 before they are used:

        with optimizer.upcast() as masters:
            overflow = scaler.unscale(master.grad for master in masters)
            clip_by_global_norm(masters, 1.0)
            if not overflow:
                optimizer.step()
        scaler.update(overflow)
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        dtype: torch.dtype = torch.float32,
        rounding: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        self.inner = optimizer(params, **options)
        self.dtype, self.rounding = dtype, rounding
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self.upcasting = False
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters of all parameters that have a gradient, and round them to the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with contextlib.nullcontext() if self.upcasting else self.upcast():
            with self._masters_in_groups():
                self.inner.step()
            for parameter, master in self.masters.items():
                if master.grad is not None:
                    parameter.copy_(self._rounded(master, parameter.dtype))
        return loss

    @contextlib.contextmanager
    def upcast(self) -> Iterator[list[nn.Parameter]]:
        """Give the masters the gradients of their parameters for the length of this context.

        Yields what `step` would update: the masters, and the parameters that are their own.
        """
        if self.upcasting:
            raise RuntimeError("upcast() inside of upcast(): the masters have their gradients already")
        trained = [parameter for parameter in self._parameters() if parameter.grad is not None]
        self.upcasting = True
        try:
            for parameter in filter(self._is_narrow, trained):
                if parameter not in self.masters:
                    self.masters[parameter] = self._copy_of(parameter)
                self.masters[parameter].grad = parameter.grad.to(self.dtype)  # type: ignore[union-attr]
            yield [self.masters.get(parameter, parameter) for parameter in trained]
        finally:
            self.upcasting = False
            for master in self.masters.values():
                master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own form; a parameter's master stands beside its moments, under the name `master`."""
        with self._masters_in_groups():
            saved = self.inner.state_dict()
        for index, parameter in enumerate(self._parameters()):
            if parameter in self.masters:
                saved["state"][index] = saved["state"].get(index, {}) | {"master": self.masters[parameter].detach()}
        return saved if self.rounding is None else saved | {"rounding": self.rounding.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, also from that of the optimizer alone: the parameters then become the masters."""
        saved = {index: dict(held) for index, held in state_dict["state"].items()}
        self.masters = {
            parameter: self._copy_of(saved[index].pop("master", parameter))
            for index, parameter in enumerate(self._parameters())
            if index in saved and self._is_narrow(parameter)
        }
        with self._masters_in_groups():
            self.inner.load_state_dict(state_dict | {"state": saved})
        if self.rounding is not None and "rounding" in state_dict:
            self.rounding.set_state(state_dict["rounding"])

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _is_narrow(self, parameter: nn.Parameter) -> bool:
        return torch.promote_types(parameter.dtype, self.dtype) != parameter.dtype

    def _copy_of(self, weight: Tensor) -> nn.Parameter:
        return nn.Parameter(weight.detach().to(self.dtype, copy=True))

    def _rounded(self, master: Tensor, dtype: torch.dtype) -> Tensor:
        if self.rounding is None or dtype != torch.bfloat16:
            return master  # copying rounds to the nearest
        return stochastic_round(master, self.rounding)

    def _share(self) -> None:
        """Have both optimizers look at one list of groups, so that a changed learning rate is seen."""
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    @contextlib.contextmanager
    def _masters_in_groups(self) -> Iterator[None]:
        """Let the groups name masters where there are any, for as long as the inner optimizer works."""
        parameters = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [self.masters.get(parameter, parameter) for parameter in group["params"]]
            yield
        finally:
            self._share()  # loading makes new groups
            for group, original in zip(self.param_groups, parameters, strict=True):
                group["params"] = original


class LossScaler:
    """Multiply the loss, so that float16 gradients do not underflow; find the scale while training.

    Parameters
    ----------
    comm : Communicator, optional
        All ranks that hold a part of the model or of the batch: one that overflows makes all of them skip the step.
    scale, growth, backoff, interval
        The scale at first, what it is multiplied by after `interval` good steps, and what after an overflow. Powers of
        two are exact. A scale with `growth=1, backoff=1` is static.
    smallest : float
        An overflow at this scale is an error: then it is not the scale that overflows.

    One all-reduce of one byte a step. Ranks whose gradients are on the device `meta` never overflow.

    Raises
    ------
    ValueError
        If a number is not in its range.
    """

    def __init__(
        self,
        comm: Communicator | None = None,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        smallest: float = 1.0,
    ) -> None:
        if not (math.inf > scale >= smallest > 0 and growth >= 1 >= backoff > 0 and interval >= 1):
            raise ValueError(
                f"a loss scaler with {scale=}, {smallest=}, {growth=}, {backoff=}, {interval=} cannot be: it needs "
                "scale >= smallest > 0, growth >= 1, 0 < backoff <= 1 and interval >= 1"
            )
        self.comm, self.scale, self.growth, self.backoff = comm, scale, growth, backoff
        self.interval, self.smallest = interval, smallest
        self.good_steps = 0  # since the scale last changed

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the float32 loss to call `backward` on."""
        return loss * self.scale

    def unscale(self, gradients: Iterable[Tensor | None]) -> bool:
        """Divide gradients by the scale, in place; return whether on any rank one is infinite or not a number.

        Collective. The answer is the same on every rank, so they skip the step together.

        Raises
        ------
        ValueError
            If a gradient is float16: without the scale it would underflow after all.
        """
        held = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
        if any(gradient.dtype == torch.float16 for gradient in held):
            raise ValueError(
                "unscaling a float16 gradient loses what the scale has saved: unscale it in float32, inside of "
                "MasterWeights.upcast()"
            )
        device = held[0].device if held and held[0].device.type != "meta" else torch.device("cpu")
        overflow = torch.zeros(1, dtype=torch.uint8, device=device)
        if held:
            torch._foreach_div_(held, self.scale)
        if held and held[0].device.type != "meta":
            largest = torch.stack(torch._foreach_norm(held, math.inf))
            overflow[0] = ~largest.isfinite().all()
        if self.comm is not None:
            all_reduce(overflow, self.comm, op="max")
        return bool(overflow)

    def update(self, overflow: bool) -> None:
        """Choose the scale of the next step.

        Raises
        ------
        RuntimeError
            If the smallest scale overflows too.
        """
        if not overflow:
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.scale, self.good_steps = self.scale * self.growth, 0
            return
        if self.scale == self.smallest and self.backoff < 1:
            raise RuntimeError(
                f"gradients are infinite or not a number even at loss scale {self.scale:g}, so the scale is not to "
                "blame: lower the learning rate, or train in bfloat16, which has the range of float32"
            )
        self.scale, self.good_steps = max(self.scale * self.backoff, self.smallest), 0

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint."""
        self.scale, self.good_steps = state["scale"], int(state["good_steps"])


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether matrices of a dtype can be multiplied on a device: float8 is emulated on a CPU, not on a GPU."""
    if dtype not in COMPUTE_DTYPES:
        return False
    if device.type == "cuda":
        needed = (8, 9) if dtype in FLOAT8 else (8, 0) if dtype == torch.bfloat16 else (0, 0)
        return torch.cuda.get_device_capability(device) >= needed
    return device.type != "mps" or dtype.itemsize in (2, 4)


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError, naming what would do, if a device cannot compute in a dtype."""
    if not supports(dtype, device):
        can = ", ".join(str(other).removeprefix("torch.") for other in COMPUTE_DTYPES if supports(other, device))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the device {device}"
        raise ValueError(f"{name} cannot compute in {str(dtype).removeprefix('torch.')}: use one of {can}")
