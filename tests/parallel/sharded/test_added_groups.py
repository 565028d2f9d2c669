"""Parameters that an optimizer over slices gets after it was built: `add_param_group`, as torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist
from minidist.full import FSDP, ZeRO1, ZeRO2
from minidist.full.comm import Communicator
from minidist.further import SlicedMuon

STAGES = (ZeRO1, ZeRO2, FSDP)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MUON = partial(SlicedMuon, lr=0.1)


def net(seed: int) -> nn.Sequential:
    """Return a model without biases, as Muon takes matrices alone."""
    generator = torch.Generator().manual_seed(seed)
    layers = [
        nn.Linear(inside, outside, bias=False) for inside, outside in ((4, 5), (5, 7), (7, 3))
    ]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, added: list[Any], rank: int) -> None:
    """Take three steps; the `added` parameters join before the second."""
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    for step in range(3):
        optimizer.zero_grad()
        model(x + step + rank).square().mean().backward()
        if step == 1:
            optimizer.add_param_group({"params": added, "lr": 0.01})
        optimizer.step()


def serial(kind: Callable[..., Any]) -> dict[str, Tensor]:
    """Return what one rank learns."""
    model = net(0)
    first, *others = model.parameters()
    others[0].requires_grad_(False)
    train(model, kind([first]), others[1:], 0)
    return model.state_dict()


@pytest.mark.parametrize("kind", (SGD, MUON), ids=("SGD", "Muon"))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("given", ("parameters", "slices"))
def test_a_group_that_is_added_later_trains_as_on_one_rank(
    given: str, stage: Any, kind: Callable[..., Any]
) -> None:
    """A frozen parameter among the added ones is left out."""

    def program(comm: Communicator) -> tuple[dict[str, Tensor], int]:
        model = net(comm.rank)
        first, *others = model.parameters()
        others[0].requires_grad_(False)
        wrapped = stage(model, comm, op="mean")
        optimizer = wrapped.optimizer(kind, [first])
        added = others if given == "parameters" else [wrapped.slice_of(others[1])]
        train(wrapped, optimizer, added, 0)
        whole = wrapped.full_state_dict() if stage is FSDP else model.state_dict()
        return whole, len(optimizer.state_dict()["state"])

    expected = serial(kind)
    for found, kept in minidist.run(program, 3):
        assert kept == 2
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_no_parameter_of_the_model_is_not_added(stage: Any) -> None:
    def program(comm: Communicator) -> None:
        model = net(0)
        optimizer = stage(model, comm, op="mean").optimizer(SGD, [model[0].weight])
        with pytest.raises(ValueError, match="no parameter of the model"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(optimizer.param_groups) == 1

    minidist.run(program, 2)
