"""ShardedOptimizer: the serial numbers beside whoever makes the gradients, from a part of the
state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import torchrun
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon

import minidist
from minidist.full import DDP, FSDP, ColumnParallel, ZeRO1, parallelize_tensor
from minidist.full.comm import Communicator, MismatchError
from minidist.full.precision.masters import MasterWeights
from minidist.further import ShardedOptimizer, SlicedMuon

STEPS = 3
KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (AdamW, {"lr": 0.02}),
    (SGD, {"lr": 0.01, "momentum": 0.9}),
    (MasterWeights, {"lr": 0.02}),
    (SlicedMuon, {"lr": 0.02}),
)


class Net(nn.Module):
    """Sizes that no number of ranks divides, a parameter without dims, a frozen one, and one that
    is never used.
    """

    def __init__(self, seed: int, only_matrices: bool = False) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        self.a, self.b = (
            nn.Linear(5, 7, bias=not only_matrices).double(),
            nn.Linear(7, 3, bias=False).double(),
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=draws)
        if not only_matrices:
            self.scale = nn.Parameter(torch.tensor(0.5 + seed, dtype=torch.float64))
            self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.a.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()) * getattr(self, "scale", torch.ones(())).exp()


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(
        2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank)
    )
    return model(x).square().sum() / 10


def serial(
    kind: Any, options: dict[str, Any], ranks: int, steps: int = STEPS
) -> tuple[nn.Module, Any]:
    model = Net(0, kind is SlicedMuon)
    optimizer = (Muon if kind is SlicedMuon else kind)(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            loss(model, step, rank).backward()
        optimizer.step()
    return model, optimizer.state_dict()


def check(ours: dict[str, Tensor], theirs: nn.Module) -> None:
    for name, b in values(theirs).items():
        assert float((ours[name] - b).abs().max()) <= 1e-9 * float(b.abs().max()), name


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("kind, options", KINDS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("first", (True, False), ids=("wrapped first", "wrapped last"))
def test_parity_beside_ddp(kind: Any, options: dict[str, Any], ranks: int, first: bool) -> None:
    def program(comm: Communicator) -> tuple[dict[str, Tensor], Any]:
        model = Net(comm.rank, kind is SlicedMuon)
        wrapped = DDP(model, comm, op="sum", unused=True) if first else None
        optimizer = ShardedOptimizer(model.named_parameters(), kind, comm, **options)
        wrapped = wrapped or DDP(model, comm, op="sum", unused=True)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(wrapped, step, comm.rank).backward()
            optimizer.step()
        return values(model), optimizer.state_dict()

    expected, state = serial(kind, options, ranks)
    results = minidist.run(program, ranks)
    for parameters, ours in results:
        check(parameters, expected)
        assert all(torch.equal(parameters[name], value) for name, value in results[0][0].items())
        assert ours["state"].keys() == state["state"].keys()
        for index, held in state["state"].items():
            assert all(
                ours["state"][index][name].shape == value.shape
                for name, value in held.items()
                if value is not None
            )


def test_gradients_set_by_hand_closures_and_schedules() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step != 1)
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.full_like(parameter, 1.0 + step)
                else:
                    parameter.grad += parameter.detach()
            found.append(optimizer.step(lambda: 7.0))  # type: ignore[arg-type]
            schedule.step()
        return found

    def program(comm: Communicator) -> dict[str, Tensor]:
        model = Net(comm.rank)
        optimizer = ShardedOptimizer(
            [{"params": layer.parameters()} for layer in (model.a, model.b)], AdamW, comm, lr=0.1
        )
        assert train(model, optimizer) == [7.0] * STEPS
        assert [group["lr"] for group in optimizer.param_groups] == [0.05] * 2
        return values(model)

    expected = Net(0)
    train(
        expected,
        AdamW([{"params": layer.parameters()} for layer in (expected.a, expected.b)], lr=0.1),
    )
    for parameters in minidist.run(program, 3):
        for name in ("a.weight", "b.weight"):
            assert torch.allclose(parameters[name], expected.get_parameter(name), rtol=1e-9, atol=0)


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_bytes_sent_and_held(ranks: int) -> None:
    def program(comm: Communicator) -> tuple[int, int, int]:
        model = Net(0)
        optimizer = ShardedOptimizer(model.parameters(), AdamW, comm)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = comm.traffic.bytes
        optimizer.step()
        held = sum(
            t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim()
        )
        return (
            comm.traffic.bytes - before,
            held,
            sum(parameter.nbytes for parameter in model.parameters()),
        )

    sent, held, total = zip(*minidist.run(program, ranks), strict=True)
    assert sum(sent) == (ranks - 1) * total[0]
    # an element more a buffer
    assert sum(held) == 2 * total[0] and max(held) <= 2 * (total[0] / ranks + 2 * 8)


def test_state_goes_from_ranks_to_ranks_and_from_an_unsharded_optimizer() -> None:
    def program(comm: Communicator, parameters: dict[str, Tensor], state: Any, steps: range) -> Any:
        model = Net(0)
        model.load_state_dict(parameters)
        optimizer = ShardedOptimizer(model.parameters(), AdamW, comm, lr=7.0)
        optimizer.load_state_dict(copy.deepcopy(state))
        for step in steps:
            optimizer.zero_grad()
            for rank in range(2):
                loss(model, step, rank).backward()
            optimizer.step()
        return values(model), optimizer.state_dict()

    begun, state = serial(AdamW, {"lr": 0.02}, 2, steps=1)
    between = minidist.run(lambda comm: program(comm, values(begun), state, range(1, 2)), 3)[1]
    for ranks in (1, 2):
        for parameters, _ in minidist.run(
            lambda comm: program(comm, *between, range(2, STEPS)), ranks
        ):
            check(parameters, serial(AdamW, {"lr": 0.02}, 2)[0])


def test_mistakes_get_a_sentence() -> None:
    def program(comm: Communicator) -> None:
        model = Net(0)
        with pytest.raises(
            ValueError, match="Adafactor is not known to treat each element for itself"
        ):
            ShardedOptimizer(model.parameters(), torch.optim.Adafactor, comm)
        with pytest.raises(MismatchError, match="have different models"):
            ShardedOptimizer([nn.Parameter(torch.zeros(3 + comm.rank))], SGD, comm)
        optimizer = ShardedOptimizer(model.b.parameters(), SGD, comm)
        with pytest.raises(TypeError, match="when it is built"):
            optimizer.add_param_group({"params": [model.a.weight]})
        for stage in (ZeRO1, FSDP):
            wrapped: Any = stage(Net(0), comm, op="sum")
            with pytest.raises(
                ValueError, match=f"built over parameters that {stage.__name__} shards"
            ):
                ShardedOptimizer(wrapped.module.parameters(), SGD, comm)

    minidist.run(program, 2)


def shared_again(model: nn.Module, comm: Communicator) -> object:
    return ShardedOptimizer(model.parameters(), SGD, comm, lr=0.1)


TAKEN: dict[str, Callable[[nn.Module, Communicator], object]] = {
    "another ShardedOptimizer": shared_again,
    "another over some": lambda model, comm: ShardedOptimizer(
        [model.get_parameter("b.weight")], SGD, comm
    ),
    "converted": lambda model, comm: model.to(torch.bfloat16),
    "one layer converted": lambda model, comm: model.get_submodule("b").float(),
    "FSDP": lambda model, comm: FSDP(model, comm, "sum", unused=True),
    "ZeRO1": lambda model, comm: ZeRO1(model, comm, "sum", unused=True),
    "tensor parallelism": lambda model, comm: parallelize_tensor(
        model, comm, {"b": ColumnParallel()}
    ),
}


# Another strategy's guard speaks before the step, a change of memory in it.
IN_VAIN = (
    "since it was shared out, so new values would not reach it|ShardedOptimizer was built over "
    "parameters that"
)


@pytest.mark.parametrize("change", TAKEN)
def test_steps_that_would_be_in_vain_are_refused(change: str) -> None:
    """Something has taken the parameters out of the buffer that this optimizer gathers; every rank
    hears of it.
    """

    def program(comm: Communicator) -> tuple[str, str]:
        model = Net(0)
        optimizer: Any = shared_again(model, comm)
        model.a.double()  # changes nothing
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        keep = TAKEN[change](model, comm)
        # freed ones show no values
        before = {} if change == "FSDP" else copy.deepcopy(values(model))
        with pytest.raises((RuntimeError, ValueError), match=IN_VAIN) as caught:
            optimizer.step()
        after = values(model) if before else {}
        assert all(torch.equal(value, before[name]) for name, value in after.items())
        return str(caught.value), str(type(keep))

    first, second = minidist.run(program, 2)
    assert first == second
    assert ("was converted from torch.float64" in first[0]) == ("converted" in change)


TORCH = """
    import torch
    import minidist
    from test_sharded_alone import STEPS, Net, check, loss, serial, values
    from minidist.further import ShardedOptimizer

    comm = minidist.init(limit=60)
    model = Net(comm.rank)
    model.unused.requires_grad_(False)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, comm, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss(wrapped, step, comm.rank) * comm.size).backward()  # it takes the mean
        optimizer.step()
    check(values(model), serial(torch.optim.AdamW, {"lr": 0.02}, comm.size)[0])
    print("equal")
"""


def test_parity_beside_torchs_ddp() -> None:
    outcome = torchrun(2, TORCH, timeout=100)
    assert outcome.returncode == 0 and outcome.stdout.count("equal") == 2, outcome.stderr
