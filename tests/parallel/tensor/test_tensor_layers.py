"""Tensor-parallel layers built directly: what torch's own layers compute, from the same weights, on
any ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist
from minidist import full as parallel
from minidist.full import (
    ColumnParallel,
    ColumnParallelLinear,
    ParallelRegion,
    RowParallel,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    adjoint,
    copy_to,
    gather_from,
    parallelize_tensor,
    reduce_from,
    scatter_to,
)
from minidist.full.comm import Communicator, MismatchError
from minidist.full.placement import placement_of

WORDS, WIDTH, MIDDLE = 11, 5, 7  # which 2 and 3 ranks do not divide
TOKENS = torch.tensor([[0, 10, 4], [4, 4, 7]])


def serial() -> tuple[Tensor, list[nn.Module]]:
    """Return the loss and the layers of torch, each drawn from a seed of one generator."""
    draws, layers = torch.Generator().manual_seed(3), []
    for kind, *sizes in (
        (nn.Embedding, WORDS, WIDTH),
        (nn.Linear, WIDTH, MIDDLE),
        (nn.Linear, MIDDLE, WIDTH),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(1 << 62, (), generator=draws)))
            layers.append(kind(*sizes, dtype=torch.float64))
    embed, up, down = layers
    loss = down(up(embed(TOKENS)).tanh()).square().sum()
    loss.backward()
    return loss, layers


@pytest.mark.parametrize("gather", (False, True))
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_layers_compute_what_torchs_do_from_the_same_weights(ranks: int, gather: bool) -> None:
    expected, whole = serial()

    def program(comm: Communicator) -> None:
        draws: Any = {"generator": torch.Generator().manual_seed(3), "dtype": torch.float64}
        embed = VocabularyParallelEmbedding(WORDS, WIDTH, comm, **draws)
        up = ColumnParallelLinear(WIDTH, MIDDLE, comm, gather=gather, **draws)
        down = RowParallelLinear(MIDDLE, WIDTH, comm, **draws)
        hidden = up(embed(TOKENS)).tanh()
        assert hidden.shape[-1] == (
            MIDDLE if gather else len(torch.tensor_split(torch.empty(MIDDLE), ranks)[comm.rank])
        )
        loss = down(scatter_to(hidden, comm, -1) if gather else hidden).square().sum()
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        for layer, reference in zip((embed, up, down), whole, strict=True):
            for name, parameter in reference.named_parameters():
                mine = layer.get_parameter(name)
                placement = placement_of(mine).block
                slices = (
                    (parameter, parameter.grad)
                    if placement is None
                    else map(placement.take, (parameter, parameter.grad))
                )
                for got, wanted in zip((mine, mine.grad.clone()), slices, strict=True):
                    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        assert ranks == 1 or up.weight.numel() < whole[1].weight.numel(), (
            "a rank holds its slice only"
        )

    minidist.run(program, ranks)


def test_generators_that_differ_are_refused_on_every_rank() -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(
            MismatchError, match="of a RowParallelLinear are not in the same state on all ranks"
        ):
            RowParallelLinear(6, 6, comm, generator=torch.Generator().manual_seed(comm.rank))
        with pytest.raises(
            ValueError,
            match="ColumnParallelLinear has 1 rows or columns to cut, too few for 2 ranks",
        ):
            ColumnParallelLinear(6, 1, comm, generator=torch.Generator())

    minidist.run(program, 2)


def test_the_differentiable_collectives_are_public() -> None:
    assert {"adjoint", "copy_to", "reduce_from", "gather_from", "scatter_to"} <= set(
        parallel.__all__
    )
    assert parallel.copy_to is adjoint.copy_to is copy_to and parallel.gather_from is gather_from
    assert parallel.reduce_from is reduce_from and parallel.scatter_to is scatter_to


class Keyworded(nn.Module):
    """A block that hands over its input by name, as every attention of Hugging Face gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(scale=2.0, hidden=x)
        return out


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(4, 6, dtype=torch.float64),
            nn.Linear(6, 4, dtype=torch.float64),
        )

    def forward(self, hidden: Tensor | None = None, scale: float = 1.0) -> Tensor:
        out: Tensor = (
            self.down(self.up(torch.ones(2, 4).double() if hidden is None else hidden).tanh())
            * scale
        )
        return out


def test_the_input_of_a_region_may_come_by_name() -> None:
    drawn = Keyworded()  # before there are ranks, which share torch's generator

    def program(comm: Communicator) -> None:
        serial, split = copy.deepcopy(drawn), copy.deepcopy(drawn)
        plan = {
            "inner": ParallelRegion(),
            "inner.up": ColumnParallel(),
            "inner.down": RowParallel(),
        }
        parallelize_tensor(split, comm, plan)
        x, y = (
            torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()
            for _ in range(2)
        )
        serial(x).sum().backward()
        split(y).sum().backward()
        torch.testing.assert_close(y.grad, x.grad)
        with pytest.raises(
            TypeError, match="inner was called with scale, and not with its first input 'hidden'"
        ):
            split.inner(scale=1.0)

    minidist.run(program, 2)
