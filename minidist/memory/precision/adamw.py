"""AdamW in one pass over flat memory.

    parameters   │ w0 │ w1 │  │ w2 ......│      views of one flat shard: one piece
    gradients    │ g0 │ g1 │  │ g2 ......│
    moments      │ m0 │ m1 │  │ m2 ......│      laid out alike
                 ├ block ─┼─ block ─┼ bl.┤      all 7 operations on one block, then the next

AdamW reads and writes four numbers per weight and does hardly anything with them, so it is as fast as memory is. Seven
operations over whole tensors fetch these numbers seven times; over a block that stays in the cache, once. A shard cut
into hundreds of small parameters would cost seven calls for each: neighbours are worked through as one piece.
(Loshchilov & Hutter 2019, algorithm 2. A kernel that keeps a number in its register through all seven operations, as
torch's `fused=True` or Apex's, saves the cache's traffic too.)

State: 2 numbers per weight, in torch's names and shapes. `state_dict` fits `torch.optim.AdamW` and vice versa.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor

BLOCK = 1 << 17  # elements; the fastest of the powers of two that were measured

Row: TypeAlias = tuple[Tensor, ...]
"""Of one parameter: the weights, gradients, means and mean squares, which may lie alike, and how many steps."""


class FusedAdamW(torch.optim.AdamW):
    """AdamW, as `torch.optim.AdamW(foreach=False)` to the last digits, and faster. Options are torch's.

    Raises
    ------
    ValueError
        In the first step, or when a state is loaded: for `amsgrad` and `maximize`, which are not offered.
    """

    elementwise = True  # slices will do

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returned."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            present = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._lay_out(group, [parameter for parameter in present if not self.state.get(parameter)])
            pieces: list[list[Row]] = []  # rows of neighbours
            for parameter in present:
                state = self.state[parameter]
                state["step"] += 1
                row = (parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
                if pieces and _continues(pieces[-1][-1], row):
                    pieces[-1].append(row)
                elif parameter.numel():  # not an empty end of a shard
                    pieces.append([row])
            for piece in pieces:
                update(piece, float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class or of `torch.optim.AdamW`."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            self._lay_out(group, [parameter for parameter in group["params"] if self.state.get(parameter)])

    def _lay_out(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Make the moments of neighbours neighbours: moments that start at zero, or were loaded."""
        if group["amsgrad"] or group["maximize"]:
            raise ValueError("FusedAdamW offers neither amsgrad=True nor maximize=True: use torch.optim.AdamW")
        for _, alike in groupby(parameters, lambda parameter: (parameter.dtype, parameter.device)):
            states = [(parameter, self.state[parameter]) for parameter in alike]
            for name in ("exp_avg", "exp_avg_sq"):
                moments = [state.get(name, torch.zeros_like(parameter)).flatten() for parameter, state in states]
                parts = torch.split(torch.cat(moments), [moment.numel() for moment in moments])
                for (parameter, state), part in zip(states, parts, strict=True):
                    state[name] = part.view(parameter.shape)
            for _, state in states:
                state.setdefault("step", torch.zeros(()))


def _continues(left: Row, right: Row) -> bool:
    """Return whether two parameters are of one age, and what belongs to the second begins where the first's ends."""
    return left[-1].equal(right[-1]) and all(
        a.is_contiguous()
        and b.is_contiguous()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.data_ptr() + a.nbytes == b.data_ptr()
        for a, b in zip(left[:-1], right[:-1], strict=True)
    )


def update(piece: list[Row], lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Do one step of AdamW on neighbours, block by block.

    With m̂ = m/(1 - β₁ᵗ) and v̂ = v/c², c = √(1 - β₂ᵗ), the step lr m̂/(√v̂ + ε) is written (lr c/(1 - β₁ᵗ)) m/(√v + cε):
    both corrections are numbers then, and cost no operation.
    """
    *tensors, age = piece[0]
    if all(tensor.is_contiguous() for tensor in tensors):  # else it stands alone, as it is
        length = sum(weights.numel() for weights, *_ in piece)
        tensors = [tensor.as_strided((length,), (1,)) for tensor in tensors]
    correction = (1 - betas[1] ** float(age)) ** 0.5
    rate = lr * correction / (1 - betas[0] ** float(age))
    size = BLOCK if tensors[0].device.type == "cpu" else len(tensors[0])  # a GPU wants it in one launch
    scratch = torch.empty_like(tensors[0][:size])
    for weights, gradients, means, squares in zip(*(torch.split(tensor, size) for tensor in tensors), strict=True):
        if weight_decay != 0:
            weights.mul_(1 - lr * weight_decay)
        means.lerp_(gradients, 1 - betas[0])
        squares.mul_(betas[1]).addcmul_(gradients, gradients, value=1 - betas[1])
        denominator = torch.sqrt(squares, out=scratch[: len(weights)]).add_(eps * correction)
        weights.addcdiv_(means, denominator, value=-rate)
