"""Muon over slices: the numbers of torch's Muon, each matrix updated by one rank, which alone holds
its momentum.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from data_parallel import CONFIG, ROWS, build, largest_difference
from torch import Tensor, nn
from torch.optim import AdamW, Muon

import minidist
from minidist.comm import Communicator
from minidist.model import cross_entropy_sum
from minidist.parallel import DDP, FSDP, ZeRO1, ZeRO2, placement_of
from minidist.parallel.data.sampler import share
from minidist.parallel.optimizer.muon import balance

OPTIONS: tuple[dict[str, Any], ...] = (
    {"lr": 0.05},
    {
        "lr": 0.01,
        "adjust_lr_fn": "match_rms_adamw",
        "nesterov": False,
        "weight_decay": 0.0,
        "ns_steps": 3,
    },
)
ADAMW = {"lr": 0.02}
BUCKETS = {"bucket_bytes": 4096, "first_bucket_bytes": 1024}


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() < 2]


def optimizers(
    model: nn.Module, wrapped: Any, options: dict[str, Any]
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices and AdamW for the others, as one does."""
    matrices, others = matrices_and_others(model)
    if isinstance(wrapped, ZeRO1 | FSDP):
        return [
            wrapped.optimizer(Muon, matrices, **options),
            wrapped.optimizer(AdamW, others, **ADAMW),
        ]
    return [Muon(matrices, **options), AdamW(others, **ADAMW)]


def train(
    model: nn.Module, both: list[torch.optim.Optimizer], steps: range, ranks: int = 1, rank: int = 0
) -> None:
    for step in steps:
        tokens = torch.randint(19, (ROWS[step], 9), generator=torch.Generator().manual_seed(step))
        mine = tokens[share(len(tokens), ranks, rank)]
        (cross_entropy_sum(model(mine[:, :-1]), mine[:, 1:]) / len(tokens)).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


def wrap(model: nn.Module, comm: Communicator, stage: Any, **options: Any) -> Any:
    return stage(model, comm, op="sum", **(options if stage is FSDP else BUCKETS))


def parameters_of(wrapped: Any) -> dict[str, Tensor]:
    if isinstance(wrapped, FSDP):
        tensors = dict(wrapped.full_tensors())
        return {name: tensors[name] for name, _ in wrapped.module.named_parameters()}
    return {name: parameter.detach() for name, parameter in wrapped.module.named_parameters()}


@cache
def serial(case: int, steps: int = len(ROWS)) -> tuple[dict[str, Tensor], Any]:
    model = build(CONFIG, 0)
    both = optimizers(model, None, OPTIONS[case])
    train(model, both, range(steps))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, both[
        0
    ].state_dict()


@pytest.mark.parametrize("case", range(len(OPTIONS)))
@pytest.mark.parametrize(
    "stage, options, ranks",
    [
        *((stage, {}, ranks) for stage in (ZeRO1, ZeRO2, FSDP) for ranks in (1, 2, 3, 4)),
        *((FSDP, {"shard_ranks": 2}, ranks) for ranks in (2, 4)),
    ],
)
def test_parity_beside_adamw(stage: Any, options: dict[str, Any], ranks: int, case: int) -> None:
    def program(comm: Communicator) -> dict[str, Tensor]:
        model = build(CONFIG, comm.rank)
        wrapped = wrap(model, comm, stage, **options)
        train(
            wrapped,
            optimizers(model, wrapped, OPTIONS[case]),
            range(len(ROWS)),
            comm.size,
            comm.rank,
        )
        return parameters_of(wrapped)

    first, *others = minidist.run(program, ranks)
    assert largest_difference(first, serial(case)[0]) <= 1e-9
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize("stage", (ZeRO1, ZeRO2, FSDP))
def test_bytes_sent_and_held(stage: Any, ranks: int) -> None:
    def program(comm: Communicator) -> tuple[int, int, int, int]:
        model = build(CONFIG, comm.rank)
        wrapped = wrap(model, comm, stage)
        both = optimizers(model, wrapped, OPTIONS[0])
        train(wrapped, both, range(1), comm.size, comm.rank)
        muon, pieces = both[0], both[0].param_groups[0]["params"]
        matrices = matrices_and_others(model)[0]
        owners = balance([parameter.numel() for parameter in matrices], comm.size)
        for piece in pieces:
            piece.grad = torch.ones_like(piece)
        before = comm.traffic.bytes_sent
        muon.step()
        sent = comm.traffic.bytes_sent - before
        held = sum(t.nbytes for state in muon.state.values() for t in state.values())
        own = sum(
            8 * parameter.numel()
            for parameter, owner in zip(matrices, owners, strict=True)
            if owner == comm.rank
        )
        assert held == own
        stays = sum(
            piece.nbytes for piece, owner in zip(pieces, owners, strict=True) if owner == comm.rank
        )
        published = (
            0
            if stage is FSDP
            else sum(
                b.flat.nbytes for b in wrapped.shards.values() if {*b.parameters} & {*matrices}
            )
        )
        return sent, held, stays, published

    sent, held, stays, published = zip(*minidist.run(program, ranks), strict=True)
    total = sum(8 * parameter.numel() for parameter in matrices_and_others(build(CONFIG, 0))[0])
    assert sum(sent) == 2 * (total - sum(stays)) + (ranks - 1) * published[0]
    assert sum(held) == total and max(held) - min(held) <= 8 * 24 * 16  # the largest matrix


def test_owners_take_the_largest_first() -> None:
    assert balance([3, 9, 1, 5, 5, 1], 2) == [0, 0, 1, 1, 1, 1]
    assert balance([4, 4], 3) == [0, 1] and balance([], 2) == []


@pytest.mark.parametrize("stage", (ZeRO1, FSDP))
def test_state_is_that_of_an_unsharded_muon_on_any_number_of_ranks(stage: Any) -> None:
    def program(comm: Communicator, given: Any, steps: range) -> Any:
        model = build(CONFIG, 0)
        if given:
            model.load_state_dict(given[0], strict=False)
        wrapped = wrap(model, comm, stage)
        both = optimizers(model, wrapped, OPTIONS[0] if not given else {"lr": 7.0})
        if given:
            both[0].load_state_dict(given[1])
            both[1].load_state_dict(given[2])
        train(wrapped, both, steps, comm.size, comm.rank)
        return parameters_of(wrapped), both[0].state_dict(), both[1].state_dict()

    written = minidist.run(lambda comm: program(comm, None, range(2)), 3)
    _, expected = serial(0, steps=2)
    for _, state, _ in written:
        assert (
            state["param_groups"] == expected["param_groups"]
            and state["state"].keys() == expected["state"].keys()
        )
        for number, held in expected["state"].items():
            ours, theirs = state["state"][number]["momentum_buffer"], held["momentum_buffer"]
            assert ours.shape == theirs.shape and float(
                (ours - theirs).abs().max()
            ) <= 1e-9 * float(theirs.abs().max())
    for ranks in (1, 2, 4):
        for parameters, _, _ in minidist.run(
            lambda comm: program(comm, written[0], range(2, len(ROWS))), ranks
        ):
            assert largest_difference(parameters, serial(0)[0]) <= 1e-9
    matrices = matrices_and_others(build(CONFIG, 0))[0]
    Muon(matrices).load_state_dict(written[0][1])


def test_the_state_of_another_model_is_refused() -> None:
    def program(comm: Communicator) -> None:
        def trained(width: int) -> torch.optim.Optimizer:
            model = ZeRO1(nn.Linear(width, 2, bias=False), comm, op="sum")
            muon = model.optimizer(Muon)
            model(torch.ones(1, width)).sum().backward()
            muon.step()
            return muon

        saved = trained(3).state_dict()
        with pytest.raises(
            ValueError,
            match=r"momentum_buffer of parameter 0 is \[2, 3\] there, weight \[2, 5\] here",
        ):
            trained(5).load_state_dict(saved)

    minidist.run(program, 2)


def test_plain_ddp_fails_these_tests() -> None:
    def program(comm: Communicator) -> int:
        model = build(CONFIG, 0)
        wrapped = DDP(model, comm, op="sum")
        both = optimizers(model, wrapped, OPTIONS[0])
        train(wrapped, both, range(1), comm.size, comm.rank)
        assert placement_of(both[0].param_groups[0]["params"][0]).slice is None
        return sum(t.nbytes for state in both[0].state.values() for t in state.values())

    total = sum(8 * parameter.numel() for parameter in matrices_and_others(build(CONFIG, 0))[0])
    assert sum(minidist.run(program, 2)) == 2 * total
