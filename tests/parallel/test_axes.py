"""Strategies over an axis that crosses another one: refused, unless all its ranks hold the same of
each parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from data_parallel import CONFIG, build, largest_difference
from ranks import mpirun, torchrun
from test_expert_parallel import BIASED
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon

import minidist
from minidist.full import (
    DDP,
    FSDP,
    NaiveDataParallel,
    ParameterServer,
    ZeRO1,
    ZeRO2,
    parallelize_tensor,
)
from minidist.full.comm import Communicator, MismatchError
from minidist.full.ddp.after_backward import PlainDataParallel
from minidist.full.expert.expert_parallel import parallelize_experts
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT, Where, cross_entropy_sum
from minidist.full.placement import placement_of
from minidist.full.precision.masters import MasterWeights
from minidist.further import Recipe, ShardedOptimizer, ZeROPlusPlus, parallelize

PLAIN = (PlainDataParallel, NaiveDataParallel, ParameterServer)
STRATEGIES: dict[str, Callable[[nn.Module, Communicator], object]] = {
    **{kind.__name__: partial(kind, op="sum") for kind in (DDP, ZeRO1, ZeRO2, FSDP, *PLAIN)},
    "ZeROPlusPlus": partial(ZeROPlusPlus, op="sum", node_ranks=1),
    "FSDP hybrid": partial(FSDP, op="sum", shard_ranks=2),
    "ShardedOptimizer": lambda model, comm: ShardedOptimizer(model.parameters(), SGD, comm),
}
# blocks of one shape, as in every real model: no broadcast would notice
EVEN = replace(CONFIG, vocabulary=20)


# ---------------------------------------------------------------- tensor parallelism


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_other_blocks_are_no_replicas(strategy: str) -> None:
    """All of them, and those of a diagonal, of which no two are on one tensor axis."""

    def program(comm: Communicator) -> list[str]:
        mesh = Mesh(comm, Layout(dp=2, tp=2))
        diagonal = comm.split(int(comm.rank in (1, 2)))
        model = build(EVEN, comm.rank).requires_grad_(True)
        parallelize_tensor(model, mesh.tp)
        before = [parameter.clone() for parameter in model.parameters()], comm.traffic.bytes
        faults = []
        for axis in (comm, mesh.tp, diagonal):
            with pytest.raises(MismatchError, match="tensor parallelism has cut it") as caught:
                STRATEGIES[strategy](model, axis)
            faults.append(str(caught.value))
        assert (
            all(map(torch.equal, model.parameters(), before[0])) and comm.traffic.bytes == before[1]
        )
        STRATEGIES[strategy](model, mesh.dp)  # as it should be
        return faults

    faults, *others = minidist.run(program, 4)
    assert all(other[0] == faults[0] for other in others)
    for fault, ranks in zip(faults, (4, 2, 2), strict=True):
        assert f"rank 0 and rank 1 of {ranks} have different models: " in fault
        assert "channels 0 to " in fault and "of embedding.weight [" in fault
        assert "pass the ranks that hold the same block: mesh.dp, or mesh.data" in fault


def test_what_the_caller_answers_for_may_differ_and_what_all_hold_may_be_shared_out() -> None:
    def program(comm: Communicator) -> None:
        mesh, model = Mesh(comm, Layout(dp=2, tp=2)), build(EVEN, 0)
        parallelize_tensor(model, mesh.tp)
        records = {parameter: placement_of(parameter).block for parameter in model.parameters()}
        whole = [p for p, record in records.items() if record is not None and record.dim is None]
        optimizer = ShardedOptimizer(whole, SGD, comm, lr=0.1)
        for parameter in whole:
            parameter.grad = torch.ones_like(parameter)
        before = [parameter.clone() for parameter in whole]
        optimizer.step()
        assert all(torch.allclose(now, then - 0.1) for now, then in zip(whole, before, strict=True))
        FSDP(model, comm, "sum", ignored=[p for p in model.parameters() if p not in set(whole)])

    minidist.run(program, 4)


WIRES = """
    import minidist
    import pytest
    from data_parallel import build
    from test_axes import EVEN
    from minidist.full.comm import MismatchError
    from minidist.full.mesh import Layout, Mesh
    from minidist.full import DDP, parallelize_tensor

    comm = minidist.init(limit=60)
    mesh, model = Mesh(comm, Layout(dp=2, tp=2)), build(EVEN, 0)
    parallelize_tensor(model, mesh.tp)
    with pytest.raises(MismatchError, match="pass the ranks that hold the same block"):
        DDP(model, comm, "sum")
    DDP(model, mesh.dp, "sum")
    print("refused")
"""


@pytest.mark.parametrize("launch", (mpirun, pytest.param(torchrun, marks=pytest.mark.soak)))
def test_processes_are_refused_too(launch: Any) -> None:
    outcome = launch(4, WIRES, timeout=100)
    assert outcome.returncode == 0 and outcome.stdout.count("refused") == 4, outcome.stderr


GROUPS = """
    import torch.distributed as dist
    import minidist
    from data_parallel import build
    from test_axes import EVEN
    from minidist.full import DDP, parallelize_tensor

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = build(EVEN, 0)
    parallelize_tensor(model, minidist.init(tensor, limit=60))
    DDP(model, minidist.init(data, limit=60), "sum")
    print("accepted")
"""


def test_groups_that_torch_has_made_have_ranks_of_their_own_and_are_accepted() -> None:
    """Each `init(group)` counts its ranks from 0, so two that share no rank have the same
    members.
    """
    outcome = torchrun(4, GROUPS, timeout=100)
    assert outcome.returncode == 0 and outcome.stdout.count("accepted") == 4, outcome.stderr


# ---------------------------------------------------------------- experts

TOKENS = torch.randint(0, 19, (8, 13), generator=torch.Generator().manual_seed(1))
MIXTURE = replace(BIASED, dropout=0.0, experts=4, balance="none", balance_rate=1e-3, tied=False)


def descent(
    model: nn.Module, called: nn.Module, rows: Tensor, finish: Callable[[], None], optimizer: Any
) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        loss = cross_entropy_sum(called(rows[:, :-1], Where(weight=1 / 96)), rows[:, 1:]) / 96
        loss.backward()  # type: ignore[no-untyped-call]
        finish()
        optimizer.step()


def experts_of(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        placement = placement_of(parameter).block
        found[name] = placement.full(parameter) if placement else parameter.detach()
    return found


@pytest.mark.parametrize("kind", [*PLAIN, "ShardedOptimizer", "ShardedOptimizer, last"])
@pytest.mark.parametrize("ep", (2, 4))
def test_experts_that_ranks_have_shared_out_are_reduced_among_their_copies(
    kind: Any, ep: int
) -> None:
    serial = GPT(MIXTURE, dtype=torch.float64)
    descent(serial, serial, TOKENS, lambda: None, AdamW(serial.parameters(), lr=0.01))
    expected = {name: parameter.detach() for name, parameter in serial.named_parameters()}

    def program(comm: Communicator) -> float:
        mesh, model = Mesh(comm, Layout(dp=4, ep=ep)), GPT(MIXTURE, dtype=torch.float64)
        parallelize_experts(model, mesh)
        optimizer: torch.optim.Optimizer
        if kind in PLAIN:
            wrapped: Any = kind(model, mesh.data, "sum")
            optimizer = AdamW(model.parameters(), lr=0.01)
        elif kind == "ShardedOptimizer":
            wrapped = DDP(model, mesh.data, "sum")
            optimizer = ShardedOptimizer(model.parameters(), AdamW, mesh.data, lr=0.01)
        else:
            optimizer = ShardedOptimizer(model.parameters(), AdamW, mesh.data, lr=0.01)
            wrapped = DDP(model, mesh.data, "sum")
        descent(model, wrapped, TOKENS.tensor_split(4)[comm.rank], wrapped.synchronize, optimizer)
        return largest_difference(experts_of(model), expected)

    assert max(minidist.run(program, 4)) <= 1e-9


def test_strategies_that_know_no_experts_say_so() -> None:
    def program(comm: Communicator) -> None:
        mesh, model = Mesh(comm, Layout(dp=2, ep=2)), GPT(MIXTURE)
        parallelize_experts(model, mesh)
        for strategy, sentence in (
            ("ZeROPlusPlus", r"ZeRO\+\+ knows no experts"),
            ("FSDP hybrid", "shard_ranks=2 knows no experts"),
        ):
            with pytest.raises(ValueError, match=sentence):
                STRATEGIES[strategy](model, mesh.data)

    minidist.run(program, 2)


# ---------------------------------------------------------------- optimizers over blocks, by hand


class Own(SGD):
    """Somebody's subclass, of which nothing is known."""


class Said(SGD):
    """Somebody's, who says that it treats each element for itself."""

    elementwise = True


@pytest.mark.parametrize("cut", ("tensor", "experts"))
def test_an_optimizer_that_needs_whole_parameters_is_refused_at_its_step(cut: str) -> None:
    def program(comm: Communicator) -> None:
        mesh = Mesh(comm, Layout(tp=2) if cut == "tensor" else Layout(dp=2, ep=2))
        model = GPT(MIXTURE if cut == "experts" else EVEN)
        early: Any = Adafactor(model.parameters())
        parallelize_tensor(model, mesh.tp) if cut == "tensor" else parallelize_experts(model, mesh)
        name = "embedding.weight" if cut == "tensor" else "layers.0.mlp.routed.experts"
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = [parameter.clone() for parameter in model.parameters()]
        refused = [early, Adafactor(model.parameters()), Own(model.parameters())]
        refused += (
            [Muon([p for p in model.parameters() if p.dim() == 2])] if cut == "tensor" else []
        )
        for optimizer in refused:
            with pytest.raises(
                ValueError, match="treat each element for itself, and this rank has only a block"
            ):
                optimizer.step()
        with pytest.raises(ValueError, match=name):
            MasterWeights(model.parameters(), Adafactor).step()
        assert all(map(torch.equal, model.parameters(), before))
        records = {parameter: placement_of(parameter).block for parameter in model.parameters()}
        Adafactor(
            [p for p, record in records.items() if record is None or record.dim is None]
        ).step()
        Said(model.parameters(), lr=0.1).step()
        MasterWeights(model.parameters(), lr=0.1).step()

    minidist.run(program, 2)


def test_what_is_said_to_a_mesh_is_not_asked_again() -> None:
    def program(comm: Communicator) -> None:
        mesh = Mesh(comm, Layout(tp=2))
        parallel = parallelize(build(EVEN, 0), mesh, Recipe(), lambda output, _: output.sum())
        optimizer = parallel.optimizer(Own, parallel.model.parameters(), elementwise=True, lr=0.1)
        parallel.step([TOKENS[:2, :8]], [None])
        optimizer.step()

    minidist.run(program, 2)
