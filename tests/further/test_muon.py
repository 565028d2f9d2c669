"""Muon over slices and blocks: the numbers of torch's Muon, each matrix made orthogonal by one rank,
and the bytes that this takes.
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
from minidist.full import DDP, FSDP, ZeRO1, ZeRO2, placement_of
from minidist.full.comm import Communicator
from minidist.full.ddp.sampler import share
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import cross_entropy_sum
from minidist.full.trainer.start import loss_of
from minidist.further import Recipe, parallelize
from minidist.further.muon.muon import SlicedMuon, balance, muon_elements
from minidist.further.muon.muon_with_adamw import MuonWithAdamW

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
            wrapped.optimizer(SlicedMuon, matrices, **options),
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
        *(
            pytest.param(stage, {}, ranks, marks=[pytest.mark.soak] * (ranks in (1, 4)))
            for stage in (ZeRO1, ZeRO2, FSDP)
            for ranks in (1, 2, 3, 4)
        ),
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
    def program(comm: Communicator) -> tuple[int, float, int, int, int]:
        model = build(CONFIG, comm.rank)
        wrapped = wrap(model, comm, stage)
        both = optimizers(model, wrapped, OPTIONS[0])
        train(wrapped, both, range(1), comm.size, comm.rank)
        muon, pieces = both[0], both[0].param_groups[0]["params"]
        matrices = matrices_and_others(model)[0]
        owners = balance([parameter.numel() for parameter in matrices], comm.size)
        for piece in pieces:
            piece.grad = torch.ones_like(piece)
        before, counted = comm.traffic.bytes, muon.matrices.sent
        muon.step()
        counted = muon.matrices.sent - counted
        published = 0
        if stage is not FSDP:
            for part in wrapped.shards.values():
                published += part.flat.nbytes * bool({*part.parameters} & {*matrices})
        held = sum(t.nbytes for state in muon.state.values() for t in state.values())
        assert held == sum(piece.nbytes for piece in pieces)
        # of each rank, not only of all together
        assert counted == 8 * muon.matrices.elements()
        owned = zip(pieces, owners, strict=True)
        stays = sum(piece.nbytes for piece, owner in owned if owner == comm.rank)
        return comm.traffic.bytes - before, counted, held, stays, published

    sent, counted, held, stays, published = zip(*minidist.run(program, ranks), strict=True)
    total = sum(8 * parameter.numel() for parameter in matrices_and_others(build(CONFIG, 0))[0])
    assert sum(counted) == 2 * (total - sum(stays)) > 0
    assert sum(sent) == sum(counted) + (ranks - 1) * published[0]
    assert sum(held) == total


def test_the_formula_of_equal_slices() -> None:
    """Two matrices of 12, each cut into equal slices and owned by one of two ranks: 2 (P - 1)/P n
    over all ranks, of 24.
    """
    slices, owners = [[6, 6], [6, 6]], [0, 1]
    assert [muon_elements(rank, slices, owners) for rank in range(2)] == [12, 12]
    # and of three ranks that hold blocks of the second, the owners gather 2/3 of it each
    assert [muon_elements(rank, slices, owners, [(1, 0), (3, 36)]) for rank in (0, 1)] == [12, 36]


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
            muon = model.optimizer(SlicedMuon)
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


# ---------------------------------------------------------------- beside AdamW, in a mesh


def parallel_run(comm: Communicator, layout: Layout, zero: int) -> tuple[Any, int, float]:
    """Train with `MuonWithAdamW`; return the whole parameters, what was sent for the updates in a
    step, and that by formula.
    """

    def loss(logits: Tensor, targets: Any) -> Tensor:
        tokens, rows = targets
        return sum_of(logits, tokens) / rows

    model, mesh = build(CONFIG, 0), Mesh(comm, layout)
    sum_of: Any = loss_of(model, mesh)
    parallel = parallelize(model, mesh, Recipe(zero=zero), loss)
    matrices, others = matrices_and_others(parallel.model)
    # what neither group says is AdamW's, so the decay of torch's Muon has to be said
    ours = {"params": matrices, "muon": True, "weight_decay": 0.1} | OPTIONS[0]
    groups = [ours, {"params": others} | ADAMW]
    optimizer: Any = parallel.optimizer(MuonWithAdamW, groups)
    data = parallel.mesh.data
    for step, rows in enumerate(ROWS):
        tokens = torch.randint(19, (rows, 9), generator=torch.Generator().manual_seed(step))
        mine = tokens[share(rows, data.size, data.rank)]
        parallel.zero_grad()
        parallel.step([mine[:, :-1]], [(mine[:, 1:], rows)])
        optimizer.step()
    sent = optimizer.matrices.sent // len(ROWS)
    parallel.unwrap()
    whole = dict(parallel.whole_parameters(build(CONFIG, 0).named_parameters()))
    return whole, sent, 8 * optimizer.matrices.elements()


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(
    "layout", (Layout(dp=2), Layout(tp=2), Layout(dp=2, tp=2)), ids=("dp", "tp", "both")
)
def test_one_optimizer_with_masters_over_slices_and_blocks(layout: Layout, zero: int) -> None:
    ranks = layout.dp * layout.tp
    outcomes = minidist.run(lambda comm: parallel_run(comm, layout, zero), ranks)
    expected = serial(0)[0]
    for whole, _, _ in outcomes:
        assert largest_difference(whole, expected) <= 1e-9
    sent = sum(each for _, each, _ in outcomes)
    # blocks are unequal (19 rows of the embedding), so only the sum is exact
    assert sent == round(sum(formula for _, _, formula in outcomes))
    assert (sent > 0) == (layout.tp > 1 or zero > 0)


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
