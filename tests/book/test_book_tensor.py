"""A cut MLP gives the serial numbers and gradients, for one all-reduce each way."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minidist.comm import Communicator
from minidist.tensor import mlp
from minidist.threads import run


def close(found: Tensor | None, wanted: Tensor | None) -> bool:
    assert found is not None and wanted is not None
    return bool((found - wanted).abs().max() <= 1e-9 * wanted.abs().max())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_cut_mlp_is_the_whole_one(ranks: int) -> None:
    draws = torch.Generator().manual_seed(0)
    x, upstream = torch.randn(2, 4, 8, 6, dtype=torch.float64, generator=draws)
    gate, up = torch.randn(2, 12, 6, dtype=torch.float64, generator=draws)
    down = torch.randn(6, 12, dtype=torch.float64, generator=draws)
    whole = [each.clone().requires_grad_() for each in (x, gate, up, down)]
    wanted = F.linear(F.silu(F.linear(whole[0], whole[1])) * F.linear(whole[0], whole[2]), whole[3])
    wanted.backward(upstream)

    def program(comm: Communicator) -> int:
        def own(matrix: Tensor, dim: int) -> Tensor:
            return matrix.chunk(ranks, dim)[comm.rank].clone().requires_grad_()

        parts = {"gate": own(gate, 0), "up": own(up, 0), "down": own(down, 1)}
        inputs = x.clone().requires_grad_()
        output = mlp(inputs, **parts, comm=comm)
        forward = comm.traffic.bytes
        output.backward(upstream)
        assert comm.traffic.bytes == 2 * forward
        assert close(output, wanted) and close(inputs.grad, whole[0].grad)
        for (name, part), each in zip(parts.items(), whole[1:], strict=True):
            assert each.grad is not None
            assert close(part.grad, each.grad.chunk(ranks, int(name == "down"))[comm.rank]), name
        return forward

    # A ring sends 2 (P - 1)/P of B T D numbers.
    assert sum(run(program, ranks)) == 2 * (ranks - 1) * x.nbytes
