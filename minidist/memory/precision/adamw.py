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

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

BLOCK = 1 << 17  # elements; the fastest of the powers of two that were measured
MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIONS = ("lr", "betas", "eps", "weight_decay")  # of a group; one loaded from torch has others besides

Row: TypeAlias = tuple[Tensor, ...]
"""Of one parameter: the tensors that lie alike."""


class Piece(NamedTuple):
    """What is worked through together, flat [n] if contiguous, after how many steps, this one included."""

    weights: Tensor
    gradients: Tensor
    means: Tensor
    mean_squares: Tensor
    step: float


class FusedAdamW(torch.optim.Optimizer):
    """AdamW, as `torch.optim.AdamW(foreach=False)` to the last digits, and faster.

    Parameters
    ----------
    params : iterable of parameters, or of groups
        Groups may have options of their own. Parameters without a gradient are left alone.
    lr, betas, eps, weight_decay
        As in torch.
    """

    elementwise = True  # slices will do

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if min(lr, eps, weight_decay) < 0 or not all(0 <= beta < 1 for beta in betas):
            given = f"lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}"
            raise ValueError(f"{given}: none may be negative, and betas are below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returned."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            present = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not present:
                continue
            self._lay_out([parameter for parameter in present if not self.state.get(parameter)])
            options = {name: group[name] for name in OPTIONS}
            for piece in self._pieces(present):
                _update(piece, **options)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class or of `torch.optim.AdamW`.

        Raises
        ------
        ValueError
            If it was made with options that change the numbers and are not offered here.
        """
        for group in state_dict["param_groups"]:
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    raise ValueError(f"the state was made with {option}=True, which FusedAdamW does not offer")
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            self._lay_out([parameter for parameter in group["params"] if self.state.get(parameter)])

    def _lay_out(self, parameters: list[Tensor]) -> None:
        """Make the moments of neighbours neighbours: moments that start at zero, or were loaded."""
        filled: list[Row] = [(parameter,) for parameter in parameters if parameter.numel()]
        empty: list[Row] = [(parameter,) for parameter in parameters if not parameter.numel()]  # an end of a shard
        for run in [*_runs(filled), *([row] for row in empty)]:
            sizes = [parameter.numel() for (parameter,) in run]
            for name in MOMENTS:
                flat = run[0][0].new_zeros(sum(sizes))
                for (parameter,), part in zip(run, torch.split(flat, sizes), strict=True):
                    moment, state = part.view(parameter.shape), self.state[parameter]
                    if name in state:
                        moment.copy_(state[name])
                    state[name] = moment
        for parameter in parameters:
            self.state[parameter].setdefault("step", torch.zeros((), dtype=torch.float32))

    def _pieces(self, parameters: list[Tensor]) -> Iterator[Piece]:
        """Count the step, and yield what is to be updated, neighbours of equal age joined."""
        ages = [self.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(ages, 1)
        rows: dict[float, list[Row]] = {}
        for parameter, age in zip(parameters, torch.stack(ages).tolist(), strict=True):
            state = self.state[parameter]
            if parameter.grad is not None and parameter.numel():
                rows.setdefault(age, []).append((parameter, parameter.grad, *(state[name] for name in MOMENTS)))
        for age, same_age in rows.items():
            for run in _runs(same_age):
                weights, gradients, means, squares = _join(run)
                yield Piece(weights, gradients, means, squares, age)


def _update(piece: Piece, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Do one step of AdamW, block by block.

    With m̂ = m/(1 - β₁ᵗ) and v̂ = v/c², c = √(1 - β₂ᵗ), the step lr m̂/(√v̂ + ε) is written (lr c/(1 - β₁ᵗ)) m/(√v + cε):
    both corrections are numbers then, and cost no operation.
    """
    correction = (1 - betas[1] ** piece.step) ** 0.5
    rate = float(lr) * correction / (1 - betas[0] ** piece.step)
    size = BLOCK if piece.weights.device.type == "cpu" else len(piece.weights)  # a GPU wants it in one launch
    scratch = torch.empty_like(piece.weights[:size])
    for weights, gradients, means, squares in zip(*(torch.split(tensor, size) for tensor in piece[:4]), strict=True):
        denominator = scratch[: len(weights)]
        if weight_decay != 0:
            weights.mul_(1 - float(lr) * weight_decay)
        means.lerp_(gradients, 1 - betas[0])
        squares.mul_(betas[1]).addcmul_(gradients, gradients, value=1 - betas[1])
        torch.sqrt(squares, out=denominator).add_(eps * correction)
        weights.addcdiv_(means, denominator, value=-rate)


def _runs(rows: list[Row]) -> list[list[Row]]:
    """Cut where a tensor does not begin in memory where that of the row before ends."""
    runs: list[list[Row]] = []
    for row in rows:
        if runs and all(map(_continues, runs[-1][-1], row)):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _continues(left: Tensor, right: Tensor) -> bool:
    return (
        left.storage_offset() + left.numel() == right.storage_offset()
        and left.dtype == right.dtype
        and torch._C._is_alias_of(left, right)  # type: ignore[attr-defined]  # views of one storage
        and left.is_contiguous()
        and right.is_contiguous()
    )


def _join(run: list[Row]) -> list[Tensor]:
    """Return one flat view over each column of a run; what is not contiguous, and so stands alone, as it is."""
    first = [tensor.detach() for tensor in run[0]]
    if not all(tensor.is_contiguous() for tensor in first):
        return first
    length = sum(row[0].numel() for row in run)
    return [tensor.as_strided((length,), (1,)) for tensor in first]
