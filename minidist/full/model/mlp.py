"""The MLP of a block: SwiGLU (Shazeer 2020)."""

import torch.nn.functional as F
from torch import Tensor, nn

from minidist.full.model.dropout import ORIGIN, Where


class MLP(nn.Module):
    """SwiGLU: a linear map, gated channel by channel by the silu of another."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = linear(hidden, intermediate)
        self.up = linear(hidden, intermediate)
        self.down = linear(intermediate, hidden)

    def forward(self, x: Tensor, where: Where = ORIGIN) -> Tensor:
        """Map every position of `x` [B, T, D] separately, wherever it is."""
        mapped: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return mapped


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear map without bias: Llama has none."""
    return nn.Linear(inputs, outputs, bias=False)
