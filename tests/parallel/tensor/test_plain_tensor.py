"""The plain page of tensor parallelism: the serial blocks' numbers, from cut weights, for one
all-reduce each way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import minidist
from minidist.full.comm import Communicator
from minidist.full.model import GPT, GPTConfig
from minidist.full.tensor import plain
from minidist.full.trace import Trace

SIZES = GPTConfig(
    vocabulary=8, layers=1, hidden=32, heads=8, key_value_heads=4, intermediate=44, sequence=64
)
# the matrix whose inputs are cut; of the others, outputs
INPUTS = {"mlp": "down", "attention": "output"}


def serial(block: str) -> tuple[Any, Tensor, Any]:
    """Return a block of the serial model, an input that requires a gradient, and the rotary
    table.
    """
    draws = torch.Generator().manual_seed(0)
    model = GPT(SIZES, draws, dtype=torch.float64)
    x = torch.randn(4, 64, 32, dtype=torch.float64, generator=draws).requires_grad_()
    return getattr(model.layers[0], block), x, model.rotary(torch.arange(64), torch.float64)


def piece(block: str, name: str, whole: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's part of a matrix, or of its gradient."""
    return whole.chunk(comm.size, dim=1 if name == INPUTS[block] else 0)[comm.rank]


def close(a: Tensor | None, b: Tensor | None) -> bool:
    assert a is not None and b is not None
    return bool((a - b).abs().max() <= 1e-9 * b.abs().max())


@pytest.mark.parametrize("block", ["mlp", "attention"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_cut_weights_give_the_serial_blocks_output_and_gradients(block: str, ranks: int) -> None:
    module, whole_x, rotary = serial(block)
    inputs = (whole_x, rotary) if block == "attention" else (whole_x,)
    expected = module(*inputs)
    upstream = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    expected.backward(upstream)
    trace = Trace()

    def program(comm: Communicator) -> None:
        x = whole_x.detach().clone().requires_grad_()
        matrices = {name: layer.weight for name, layer in module.named_children()}
        mine = {
            name: piece(block, name, w.detach(), comm).clone().requires_grad_()
            for name, w in matrices.items()
        }
        with comm.span("forward"):
            y = (
                plain.mlp(x, mine, comm)
                if block == "mlp"
                else plain.attention(x, mine, 4, comm, rotary)
            )
        with comm.span("backward"):
            y.backward(upstream)
        assert close(y, expected) and close(x.grad, whole_x.grad)
        for name, matrix in matrices.items():
            assert matrix.grad is not None
            assert close(mine[name].grad, piece(block, name, matrix.grad, comm)), name
        # two ring all-reduces
        assert sum(comm.all_gather_object(comm.traffic.bytes)) == 2 * 2 * (ranks - 1) * x.nbytes

    minidist.run(program, ranks, debug=True, trace=trace)
    for rank in range(ranks):
        mine = [event for event in trace.events if event.rank == rank]
        forward, backward = (
            next(e for e in mine if e.name == name) for name in ("forward", "backward")
        )
        reductions = [event for event in mine if event.kind == "collective"]
        assert [event.bytes for event in reductions] == [whole_x.nbytes] * (2 if ranks > 1 else 0)
        assert all(event.name.startswith("all_reduce") for event in reductions)
        if ranks > 1:
            assert (
                forward.start
                <= reductions[0].end
                <= forward.end
                <= backward.start
                <= reductions[1].start
            )
