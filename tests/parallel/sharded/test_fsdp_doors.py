"""What FSDP offers besides: parameters that stay whole or are left alone, precision by module,
whole gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel

import minidist
from minidist.full import FSDP, MixedPrecision, clip_by_global_norm
from minidist.full.comm import Communicator


def net(seed: int = 0) -> nn.Sequential:
    """Matrices whose elements no number of ranks divides, and norms."""
    draws = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draws)
    return model


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(
        2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank)
    )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: range | tuple[int, ...]
) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            model(rows(step, rank)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("ranks, group", ((1, None), (2, None), (3, None), (4, 2)))
def test_replicated_parameters_stay_whole_and_are_all_reduced(
    ranks: int, group: int | None
) -> None:
    """2 (P - 1)/P of their bytes, where sharding costs 3 (P - 1)/P, or 2 for the root's."""

    def program(comm: Communicator) -> tuple[float, float, int]:
        model, serial = net(comm.rank), net()
        norm = tuple(model[1].parameters())
        wrapped = FSDP(
            model,
            comm,
            op="sum",
            policy=lambda module: isinstance(module, nn.Linear),
            shard_ranks=group,
            replicated=norm,
        )
        before = comm.traffic.bytes
        optimizer = wrapped.optimizer(AdamW, lr=0.05)
        train(wrapped, optimizer, (comm.rank,))
        sent = comm.traffic.bytes - before
        assert not any(parameter.isnan().any() for parameter in norm), "whole between steps"
        assert [wrapped.slice_of(parameter).numel() for parameter in norm] == [7, 7]
        assert optimizer.state_dict()["state"].keys() == set(range(6))
        train(serial, AdamW(serial.parameters(), lr=0.05), range(comm.size))
        ours = wrapped.full_state_dict()
        off = max(
            float((ours[name] - b).abs().max() / b.abs().max())
            for name, b in serial.state_dict().items()
        )
        return off, float(sent), comm.size

    outcomes = minidist.run(program, ranks)
    assert max(off for off, *_ in outcomes) <= 1e-9
    if group is None:
        sharded, kept = 8 * (5 * 7 + 7 + 7 * 3 + 3), 8 * (7 + 7)
        assert sum(sent for _, sent, _ in outcomes) == 3 * (ranks - 1) * (3 * sharded + 2 * kept)


def test_ignored_parameters_are_left_as_they_are() -> None:
    def program(comm: Communicator) -> tuple[Any, ...]:
        model = net(comm.rank)
        weight = model[3].weight
        before = weight.detach().clone()
        wrapped = FSDP(model, comm, op="sum", ignored=[weight])
        optimizer = wrapped.optimizer(AdamW, lr=0.05)
        assert len(wrapped.slices) == 5
        with pytest.raises(ValueError, match="is no parameter of the model in FSDP"):
            wrapped.optimizer(AdamW, [weight])
        train(wrapped, optimizer, (comm.rank,))
        assert torch.equal(weight, before) and torch.equal(
            wrapped.full_state_dict()["3.weight"], before
        )
        assert weight.grad is not None
        saved = {name: value.clone() for name, value in wrapped.full_state_dict().items()}
        weight.detach().zero_()
        wrapped.load(saved)
        assert torch.equal(weight, before), "they are saved and loaded, too"
        return weight.detach(), weight.grad, wrapped.full_state_dict()["0.weight"]

    (one, its, same), (other, another, alike) = minidist.run(program, 2)
    assert (
        not torch.equal(one, other) and not torch.equal(its, another) and torch.equal(same, alike)
    )


def test_a_unit_may_be_ignored_as_a_whole() -> None:
    def program(comm: Communicator) -> tuple[int, bool]:
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        model.forward = lambda x: model.layers[2](model.layers[1](model.layers[0](x)))  # type: ignore[method-assign]
        first = model.layers[0]
        wrapped = FSDP(model, comm, op="sum", ignored=list(first.parameters()))
        wrapped(torch.ones(2, 4)).sum().backward()
        return len(wrapped.slices), first.weight.grad is not None

    assert minidist.run(program, 2) == [(4, True)] * 2


def test_parameters_of_a_model_on_meta_are_replicated_and_ignored_too() -> None:
    def program(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(5, 7, device="meta"), nn.LayerNorm(7, device="meta"))
        (weight, bias), matrix = model[1].parameters(), model[0].weight
        wrapped = FSDP(model, comm, op="sum", device="cpu", replicated=[weight], ignored=[bias])
        assert wrapped.slice_of(weight).numel() == 7 and wrapped.slice_of(matrix).numel() < 35
        assert bias not in wrapped.names and all(
            parameter.device.type == "cpu" for parameter in model.parameters()
        )

    minidist.run(program, 2)


def test_parameters_of_another_model_are_neither_replicated_nor_ignored() -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(
            ValueError,
            match="6 of the parameters in replicated= and ignored= are none of the model's",
        ):
            FSDP(net(), comm, op="sum", replicated=list(net().parameters()))

    minidist.run(program, 2)


def test_a_mean_of_weights_goes_along_in_a_copy() -> None:
    """torch's `AveragedModel` copies the module, and then reads its parameters at each update."""

    def program(comm: Communicator) -> None:
        wrapped, serial = FSDP(net(comm.rank), comm, op="sum"), net()
        with wrapped.gathered():
            ours, theirs = AveragedModel(wrapped.module), AveragedModel(serial)
        optimizers = wrapped.optimizer(AdamW, lr=0.05), AdamW(serial.parameters(), lr=0.05)
        for step in range(2):
            for model, optimizer, ranks in (
                (wrapped, optimizers[0], (comm.rank,)),
                (serial, optimizers[1], range(comm.size)),
            ):
                optimizer.zero_grad()
                for rank in ranks:
                    model(rows(step, rank)).square().sum().backward()
                optimizer.step()
            theirs.update_parameters(serial)
            with wrapped.gathered():
                ours.update_parameters(wrapped.module)
        assert torch.allclose(ours(rows(9, 0)), theirs(rows(9, 0)), rtol=1e-9)

    minidist.run(program, 2)


def test_a_saved_state_is_one_moment_and_the_same_on_every_rank() -> None:
    """Running averages are each rank's own until its next forward, and go on changing in place."""

    def program(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)).double()
        wrapped = FSDP(model, comm, op="sum")
        wrapped(rows(0, comm.rank))
        averages = model[1].running_mean.clone()  # type: ignore[operator]
        state = wrapped.full_state_dict()
        wrapped(rows(1, comm.rank))
        for rank, (of_rank, saved) in enumerate(comm.all_gather_object((averages, state))):
            assert all(torch.equal(saved[name], value) for name, value in state.items())
            assert torch.equal(of_rank, state["1.running_mean"]) == (rank == 0)

    minidist.run(program, 2)


def test_precision_is_chosen_by_module() -> None:
    def precision(module: nn.Module) -> MixedPrecision:
        small = isinstance(module, nn.Linear) and module.out_features == 7
        return (
            MixedPrecision(torch.bfloat16, torch.float32, torch.float64)
            if small
            else MixedPrecision(torch.float64)
        )

    def program(comm: Communicator) -> None:
        model = net()
        seen = []
        for layer in (model[0], model[3]):
            layer.register_forward_hook(lambda m, _, y: seen.append((m.weight.dtype, y.dtype)))
        wrapped = FSDP(
            model,
            comm,
            op="sum",
            policy=lambda module: isinstance(module, nn.Linear),
            precision=precision,
        )
        train(wrapped, wrapped.optimizer(AdamW, lr=0.05), (comm.rank,))
        assert seen == 3 * [2 * (torch.bfloat16,), 2 * (torch.float64,)]
        assert {piece.dtype for piece in wrapped.slices} == {torch.float64}

    minidist.run(program, 2)


@pytest.mark.parametrize("ranks", (1, 3))
def test_whole_gradients_are_the_serial_ones_also_when_clipped(ranks: int) -> None:
    def program(comm: Communicator) -> None:
        model, serial = net(), net()
        model[3].bias.requires_grad_(False)
        wrapped = FSDP(model, comm, op="sum", replicated=tuple(model[1].parameters()))
        assert all(gradient is None for _, gradient in wrapped.full_gradients())
        wrapped(rows(0, comm.rank)).square().sum().backward()
        for rank in range(comm.size):
            serial(rows(0, rank)).square().sum().backward()
        serial[3].bias.grad = None
        for clipped in (False, True):
            if clipped:
                clip_by_global_norm(wrapped.slices, 0.5)
                clip_by_global_norm(serial.parameters(), 0.5)
            expected = {
                name: parameter.grad
                for name, parameter in serial.named_parameters()
                if name != "3.bias"
            }
            found = dict(wrapped.full_gradients())
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)

    minidist.run(program, ranks)
