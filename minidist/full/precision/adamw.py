"""AdamW in one pass over each parameter.

    parameter    │ w ....................│
    gradient     │ g ....................│
    moments      │ m ....................│
                 ├ block ┼─ block ┼─ blo.┤      all 7 operations on one block, then on the next

AdamW reads and writes four numbers per weight and computes little with them, so memory bounds its
speed. Seven operations over whole tensors fetch these numbers seven times. Over a block that stays
in the cache, they fetch them once. That pays for large parameters, such as a flat shard.
(Loshchilov & Hutter 2019, algorithm 2. A kernel that keeps a number in its register through all
seven operations, such as torch's `fused=True`, saves the cache's traffic too.)

State: 2 numbers per weight, in torch's names and shapes. `state_dict` fits `torch.optim.AdamW` and
vice versa.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 17  # elements; the fastest power of two that was measured


class FusedAdamW(torch.optim.AdamW):
    """AdamW with the results of `torch.optim.AdamW(foreach=False)` up to rounding, and torch's
    options.

    Raises
    ------
    ValueError
        In `step`, for `amsgrad` and `maximize`, which are not offered.
    """

    elementwise = True  # a shard of a parameter can be updated alone

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first,
        returned.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            if group["amsgrad"] or group["maximize"]:
                raise ValueError(
                    "FusedAdamW offers neither amsgrad=True nor maximize=True: use "
                    "torch.optim.AdamW"
                )
            for parameter in (
                parameter for parameter in group["params"] if parameter.grad is not None
            ):
                state = self.state[parameter]
                if not state:
                    zeros = torch.zeros_like(parameter)
                    state.update(step=torch.zeros(()), exp_avg=zeros, exp_avg_sq=zeros.clone())
                state["step"] += 1
                tensors = [
                    parameter.detach(),
                    parameter.grad.as_subclass(Tensor),
                    state["exp_avg"],
                    state["exp_avg_sq"],
                ]
                options = float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]
                update(tensors, float(state["step"]), *options)
        return loss


def update(
    tensors: list[Tensor],
    age: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Do step number `age` of AdamW on weights, gradients, means and mean squares of one shape,
    block by block.

    With m̂ = m/(1 - β₁ᵗ) and v̂ = v/c², c = √(1 - β₂ᵗ), the step lr m̂/(√v̂ + ε) is written
    (lr c/(1 - β₁ᵗ)) m/(√v + cε): both corrections are then numbers, and cost no operation on tensors.
    """
    correction = (1 - betas[1] ** age) ** 0.5
    rate = lr * correction / (1 - betas[0] ** age)
    # one block, unless there is a cache to stay in: a GPU wants one launch
    size = tensors[0].numel()
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = [tensor.view(-1) for tensor in tensors]
        size = BLOCK if tensors[0].device.type == "cpu" else size
    scratch = torch.empty_like(tensors[0][:size])
    for weights, gradients, means, squares in zip(
        *(torch.split(tensor, size) for tensor in tensors), strict=True
    ):
        if weight_decay != 0:
            weights.mul_(1 - lr * weight_decay)
        means.lerp_(gradients, 1 - betas[0])
        squares.mul_(betas[1]).addcmul_(gradients, gradients, value=1 - betas[1])
        denominator = torch.sqrt(squares, out=scratch[: len(weights)]).add_(eps * correction)
        weights.addcdiv_(means, denominator, value=-rate)
