"""Optimizers over parameters that ranks share out: what they accept, what they refuse, and the
numbers.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from data_parallel import CONFIG, build
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim import optimizer as torch_hooks

import minidist
from minidist.full import FSDP, ZeRO1, ZeRO2
from minidist.full.comm import Communicator
from minidist.full.memory.offload import OffloadedOptimizer
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import cross_entropy_sum
from minidist.full.optimizer.guard import GUARDS
from minidist.full.precision.adamw import FusedAdamW
from minidist.full.precision.masters import MasterWeights
from minidist.further import Recipe, SlicedMuon, parallelize

STAGES = (ZeRO1, ZeRO2, FSDP)
EACH = pytest.mark.parametrize("stage", STAGES)


def net(seed: int = 0) -> nn.Sequential:
    """Matrices whose elements no number of ranks divides, and a bias that is frozen."""
    draws = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draws)
    model[2].bias.requires_grad_(False)
    return model


def rows(step: int, rank: int = 0) -> Tensor:
    return torch.randn(
        2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank)
    )


def whole(wrapped: Any) -> dict[str, Tensor]:
    if isinstance(wrapped, FSDP):
        return wrapped.full_state_dict()
    return {name: parameter.detach() for name, parameter in wrapped.module.named_parameters()}


def difference(ours: dict[str, Tensor], theirs: nn.Module) -> float:
    return max(
        float((ours[name] - b).abs().max() / b.abs().max())
        for name, b in theirs.state_dict().items()
    )


# ---------------------------------------------------------------- what is accepted

WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters": lambda model: model.parameters(),
    "pairs": lambda model: model.named_parameters(),
    "one tensor a group": lambda model: [{"params": parameter} for parameter in model.parameters()],
    "pairs in groups": lambda model: [
        {"params": list(model[0].named_parameters()), "lr": 0.2},
        {"params": model[2].named_parameters()},
    ],
    "a generator of groups": lambda model: (
        {"params": layer.parameters(), "lr": 0.3} for layer in model
    ),
}


@EACH
@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_given_in_all_ways_of_torch(stage: Any, way: str) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                model(rows(step, rank)).square().sum().backward()
            optimizer.step()

    def named(optimizer: torch.optim.Optimizer) -> list[str]:
        return [
            name
            for group in optimizer.state_dict()["param_groups"]
            for name in group.get("param_names", [])
        ]

    def program(comm: Communicator) -> tuple[float, list[str], list[str]]:
        model, serial = net(comm.rank), net()
        wrapped = stage(model, comm, op="sum")
        optimizer = wrapped.optimizer(SGD, WAYS[way](model), lr=0.05, momentum=0.9)
        train(wrapped, optimizer, [comm.rank])
        expected = SGD(WAYS[way](serial), lr=0.05, momentum=0.9)
        train(serial, expected, [0, 1])
        return difference(whole(wrapped), serial), named(optimizer), named(expected)

    for off, ours, theirs in minidist.run(program, 2):
        assert off <= 1e-9
        assert ours == theirs[:-1]  # the last one is frozen, and left out


def groups_of(part: Callable[[nn.Module], Any]) -> Callable[[nn.Module, nn.Module], Any]:
    return lambda mine, other: [{"params": part(mine)}, {"params": part(other)}]


@EACH
@pytest.mark.parametrize(
    "given, error, sentence",
    (
        (
            lambda mine, other: other.parameters(),
            ValueError,
            r"parameter 0 of group 0, of shape \[7, 5\], is no param",
        ),
        (
            lambda mine, other: other.named_parameters(),
            ValueError,
            r"0.weight of group 0, of shape \[7, 5\], is no pa",
        ),
        (
            groups_of(lambda model: model[2].weight),
            ValueError,
            r"parameter 0 of group 1, of shape \[3, 7\], is no par",
        ),
        (lambda mine, other: mine[0].weight, TypeError, "an iterable of Tensors or dicts"),
        (
            lambda mine, other: [{"params": set(mine.parameters())}],
            TypeError,
            "ordered collections",
        ),
        (lambda mine, other: ["weight"], TypeError, "one of the params is str"),
    ),
)
def test_what_is_no_parameter_of_the_model_is_refused(
    stage: Any, given: Any, error: type, sentence: str
) -> None:
    def program(comm: Communicator) -> None:
        model, other = net(), net()
        with pytest.raises(error, match=sentence):
            stage(model, comm, op="sum").optimizer(SGD, given(model, other))

    minidist.run(program, 2)


@pytest.mark.parametrize("zero, dp", ((0, 1), (0, 2), (1, 2), (3, 2)))
def test_a_mesh_refuses_parameters_of_another_model(zero: int, dp: int) -> None:
    def program(comm: Communicator) -> None:
        mesh = Mesh(comm, Layout(dp=dp))
        parallel = parallelize(net(), mesh, Recipe(zero=zero), lambda output, target: output.sum())  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"0.weight of group 0, of shape \[7, 5\], is no parameter of"
        ):
            parallel.optimizer(SGD, net().named_parameters())
        optimizer = parallel.optimizer(SGD, parallel.model.named_parameters(), lr=0.1)
        before = [piece.clone() for piece in parallel.replica.trained]
        parallel.step([rows(0)], [None])
        optimizer.step()
        assert not all(
            torch.equal(a, b) for a, b in zip(before, parallel.replica.trained, strict=True)
        )

    minidist.run(program, dp)


# ---------------------------------------------------------------- what is refused when it steps


def test_importing_changes_no_hooks_of_torch() -> None:
    program = """
import importlib, pkgutil, sys
import torch

def hooks():
    return {
        (name, variable): list(value)
        for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "torch"
        for variable, value in vars(module).items() if "hook" in variable and isinstance(value, dict)
    }

before = hooks()
assert ("torch.optim.optimizer", "_global_optimizer_pre_hooks") in before
for floor in ("full", "further"):
    package = importlib.import_module(f"minidist.{floor}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".kernels." not in module.name:  # Triton is where a GPU is
            importlib.import_module(module.name)
print({where: names for where, names in hooks().items() if names and names != before.get(where)})
"""
    outcome = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert outcome.stdout.strip() == "{}"


@EACH
@pytest.mark.parametrize("unwrap", (True, False))
def test_torch_is_hooked_while_a_sharded_model_lives(stage: Any, unwrap: bool) -> None:
    def program(comm: Communicator) -> None:
        wrapped = stage(net(), comm, op="sum")
        optimizer = wrapped.optimizer(SGD)
        comm.barrier()
        assert guards() == before + 2 and len(torch_hooks._global_optimizer_pre_hooks) == 1  # type: ignore[attr-defined]
        comm.barrier()
        if unwrap:
            wrapped.unwrap()
            comm.barrier()
            assert guards() == before
        del wrapped, optimizer

    def guards() -> int:
        assert bool(GUARDS.posted) == bool(torch_hooks._global_optimizer_pre_hooks)  # type: ignore[attr-defined]
        return len(GUARDS.posted)

    gc.collect()
    before = guards()
    minidist.run(program, 2)
    gc.collect()
    assert guards() == before


@EACH
def test_an_optimizer_over_slices_is_refused_unless_the_model_has_built_it(stage: Any) -> None:
    def program(comm: Communicator) -> None:
        wrapped = stage(net(), comm, op="sum")
        wrapped(rows(0)).sum().backward()
        for kind in (SGD, MasterWeights):
            with pytest.raises(
                ValueError,
                match=f"this {kind.__name__} was built over slices of {stage.__name__} by",
            ):
                kind(wrapped.slices, lr=0.1).step()
            wrapped.optimizer(kind, lr=0.1).step()
            wrapped.optimizer(kind, wrapped.slices, lr=0.1).step()
        added = wrapped.optimizer(SGD, [wrapped.module[0].weight])
        added.param_groups[0]["params"].append(wrapped.module[0].bias)  # past `add_param_group`
        with pytest.raises(ValueError, match=f"built over parameters that {stage.__name__} shards"):
            added.step()

    minidist.run(program, 2)


@EACH
def test_a_step_that_would_ignore_a_gradient_is_refused(stage: Any) -> None:
    def program(comm: Communicator) -> None:
        wrapped = stage(net(), comm, op="sum")
        optimizer = wrapped.optimizer(SGD, lr=0.1)
        for parameter in wrapped.parameters_to_reduce:
            for other in (torch.ones_like(parameter), torch.zeros_like(parameter)):
                with pytest.raises(
                    ValueError, match="another tensor in its place would change nothing"
                ):
                    parameter.grad = other
        before = whole(wrapped)["0.weight"].clone()
        for piece in wrapped.slices:
            piece.grad = torch.ones_like(piece)
        optimizer.step()
        assert torch.allclose(whole(wrapped)["0.weight"], before - 0.1)

        def backward_and_step(clip: bool = False, again: bool = False, finish: bool = True) -> None:
            optimizer.zero_grad()
            wrapped(rows(0)).sum().backward()
            with wrapped.no_sync():
                if again:
                    wrapped(rows(0)).sum().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(wrapped.module.parameters(), 0.01)
            if finish:
                wrapped(rows(0)).sum().backward()
            optimizer.step()

        backward_and_step(again=True)
        with pytest.raises(ValueError, match=r"let the last backward.. run outside of no_sync"):
            backward_and_step(again=True, finish=False)
        backward_and_step(clip=True, finish=False)  # parameters show the gradients of their slices
        with pytest.raises(
            ValueError, match=r"and clip or set the gradients of model.slices, not of parameters"
        ):
            backward_and_step(again=True, clip=True, finish=False)

    minidist.run(program, 2)


@EACH
@pytest.mark.parametrize("when", ("before forward", "before the step"))
def test_a_model_inside_that_was_converted_is_refused(stage: Any, when: str) -> None:
    """Its parameters would keep the values, or the dtype, that they had."""

    def program(comm: Communicator) -> None:
        wrapped = stage(net(), comm, "sum")
        optimizer = wrapped.optimizer(SGD, lr=0.1)
        if stage is not FSDP:
            wrapped.module.double()  # changes nothing
        wrapped(rows(0)).sum().backward()
        optimizer.step()
        said = r"converted from torch\.float64( on cpu|, cpu) to torch\.float32"
        if stage is FSDP:  # at once, as there is nothing to convert
            said = r"0.weight is freed .* so 'float' would find NaN.* convert or move a model before wrapping it"
        with pytest.raises(RuntimeError, match=said):
            if when == "before forward":
                wrapped.module.float()
                wrapped(rows(0).float()).sum().backward()
            else:
                wrapped(rows(0)).sum().backward()
                wrapped.module.float()
            optimizer.step()

    minidist.run(program, 2)


# ---------------------------------------------------------------- one that exists


@EACH
@pytest.mark.parametrize("ranks", (1, 3))
def test_an_optimizer_that_exists_is_adopted_with_its_state(stage: Any, ranks: int) -> None:
    """It has taken a step alone, and a schedule holds it; the state of its frozen parameter is left
    behind.
    """

    def steps(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        ranks: list[int],
        first: int,
    ) -> None:
        for step in range(first, first + 2):
            optimizer.zero_grad()
            for rank in ranks:
                model(rows(step, rank)).square().sum().backward()
            optimizer.step()
            schedule.step()

    def program(comm: Communicator) -> tuple[float, list[list[int]]]:
        found = []
        for wrap in (True, False):
            model = net()
            optimizer = AdamW(model.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            steps(model, optimizer, schedule, list(range(comm.size)), 0)
            wrapped: Any = stage(model, comm, op="sum") if wrap else model
            if wrap:
                wrapped.adopt(optimizer)
            steps(wrapped, optimizer, schedule, [comm.rank] if wrap else list(range(comm.size)), 2)
            found.append((wrapped, optimizer))
        (ours, adopted), (serial, _) = found
        moments = [list(value["exp_avg"].shape) for value in adopted.state_dict()["state"].values()]
        return difference(whole(ours), serial), moments

    for off, moments in minidist.run(program, ranks):
        assert off <= 1e-9
        assert moments == [[7, 5], [7], [3, 7]]


@EACH
def test_what_cannot_update_slices_is_not_adopted_and_stays_as_it_was(stage: Any) -> None:
    def program(comm: Communicator) -> None:
        model = net()
        optimizer = torch.optim.Muon([model[0].weight])
        wrapped = stage(model, comm, op="sum")
        with pytest.raises(ValueError, match="Muon is not known to treat each element for itself"):
            wrapped.adopt(optimizer)
        assert optimizer.param_groups[0]["params"] == [model[0].weight]
        with pytest.raises(ValueError, match="is no parameter of the model in"):
            wrapped.adopt(SGD(net().parameters()))

    minidist.run(program, 2)


# ---------------------------------------------------------------- two optimizers


@EACH
@pytest.mark.parametrize("ranks", (1, 3))
@pytest.mark.parametrize(
    "together", (True, False), ids=("zeroed together", "zeroed after each step")
)
def test_two_optimizers_share_a_model(stage: Any, ranks: int, together: bool) -> None:
    def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], ranks: list[int]) -> None:
        for step in range(3):
            for rank in ranks:
                model(rows(step, rank)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                if not together:
                    optimizer.zero_grad()
            for optimizer in optimizers[: 2 if step else 1] if together else []:
                # after the first step the second one's gradients stay, and are added to
                optimizer.zero_grad()

    def program(comm: Communicator) -> float:
        model, serial = net(comm.rank), net()
        wrapped = stage(model, comm, op="sum")
        halves = [{"kind": SGD, "lr": 0.05}, {"kind": AdamW, "lr": 0.01}]
        split = [[model[0].weight, model[2].weight], [model[0].bias]]
        train(
            wrapped,
            [
                wrapped.optimizer(groups=own, **half)
                for own, half in zip(split, halves, strict=True)
            ],
            [comm.rank],
        )
        optimizers = [
            SGD([serial[0].weight, serial[2].weight], lr=0.05),
            AdamW([serial[0].bias], lr=0.01),
        ]
        train(serial, optimizers, list(range(comm.size)))
        return difference(whole(wrapped), serial)

    assert max(minidist.run(program, ranks)) <= 1e-9


# ---------------------------------------------------------------- state


class Warm(nn.Module):
    """Has a parameter without dims, as CLIP's temperature, among others or in an optimizer of its
    own.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers, self.temperature = (
            net(seed),
            nn.Parameter(torch.tensor(0.5 + seed, dtype=torch.float64)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.temperature.exp()


KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (AdamW, {"amsgrad": True}),
    (SGD, {"momentum": 0.9}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {"t0": 1.0}),
    (MasterWeights, {}),
)


@EACH
@pytest.mark.parametrize("alone", (False, True))
@pytest.mark.parametrize("kind, options", KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_state_of_a_parameter_without_dims_goes_from_ranks_to_ranks(
    stage: Any, alone: bool, kind: Any, options: dict[str, Any]
) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        (model(rows(number)).square().sum() / 10).backward()
        optimizer.step()

    def trained(model: Any) -> Any:
        return [model.temperature] if alone else [p for p in model.parameters() if p.requires_grad]

    def program(comm: Communicator, given: Any) -> tuple[Any, dict[str, Tensor], bool]:
        model = Warm(comm.rank)
        wrapped = stage(model, comm, op="mean")
        optimizer = wrapped.optimizer(kind, trained(model), lr=0.02, **options)
        if given is None:
            step(wrapped, optimizer, 0)
        else:
            wrapped.load(given[1]) if stage is FSDP else model.load_state_dict(given[1])
            optimizer.load_state_dict(given[0])
        step(wrapped, optimizer, 1)
        return (
            optimizer.state_dict(),
            whole(wrapped),
            bool(wrapped.slice_of(model.temperature).numel()),
        )

    serial = Warm()
    expected = kind(trained(serial), lr=0.02, **options)
    for number in range(2):
        step(serial, expected, number)
    written = minidist.run(lambda comm: program(comm, None), 3)
    assert sorted(holds for _, _, holds in written) == [False, False, True]
    assert max(difference(parameters, serial) for _, parameters, _ in written) <= 1e-9
    step(serial, expected, 1)
    for _, parameters, _ in minidist.run(lambda comm: program(comm, written[1]), 2):
        assert difference(parameters, serial) <= 1e-9
    unsharded = kind(trained(serial), lr=0.02, **options)
    unsharded.load_state_dict(written[0][0])
    for index, held in expected.state_dict()["state"].items():
        theirs = written[0][0]["state"][index]
        assert {
            name: torch.as_tensor(value).shape for name, value in held.items() if value is not None
        } == {
            name: torch.as_tensor(value).shape
            for name, value in theirs.items()
            if value is not None
        }


# ---------------------------------------------------------------- what needs more than single elements


class Same(AdamW):
    """Inherits, and says nothing."""


class Sayer(AdamW):
    """Inherits, and says that it is as good."""

    elementwise = True


@EACH
def test_what_is_not_known_to_work_element_by_element_is_refused(stage: Any) -> None:
    def program(comm: Communicator) -> None:
        wrapped = stage(net(), comm, op="sum")
        unknown = (
            torch.optim.Adafactor,
            torch.optim.LBFGS,
            Same,
            partial(torch.optim.Adafactor, lr=0.1),
        )
        for kind in unknown:
            name = getattr(kind, "__name__", "Adafactor")
            with pytest.raises(
                ValueError, match=f"{name} is not known to treat each element for itself"
            ):
                wrapped.optimizer(kind)
        for inner in (torch.optim.Adafactor, torch.optim.Muon):
            with pytest.raises(ValueError, match=f"{inner.__name__} is not known"):
                wrapped.optimizer(MasterWeights, optimizer=inner)
        with pytest.raises(
            ValueError, match=r"Muon is for matrices, and 0.bias has the shape \[7\]"
        ):
            wrapped.optimizer(SlicedMuon)
        wrapped.optimizer(Same, elementwise=True)
        wrapped.optimizer(MasterWeights, optimizer=Same, elementwise=True)
        for kind in (Sayer, MasterWeights, OffloadedOptimizer, FusedAdamW, partial(AdamW, lr=0.1)):
            wrapped.optimizer(kind)

    minidist.run(program, 2)


@pytest.mark.parametrize("dp, zero", ((1, 0), (2, 0), (2, 1)))
def test_blocks_of_tensor_parallelism_are_parts_too(dp: int, zero: int) -> None:
    def program(comm: Communicator) -> None:
        model = build(CONFIG, 0)
        parallel = parallelize(
            model, Mesh(comm, Layout(dp=dp, tp=2)), Recipe(zero=zero), cross_entropy_sum
        )  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="Adafactor is not known to treat each element"):
            parallel.optimizer(torch.optim.Adafactor, model.parameters())
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        # torch's own would update a block as if it were the matrix
        with pytest.raises(ValueError, match="Muon is not known to treat each element"):
            parallel.optimizer(torch.optim.Muon, matrices)
        parallel.optimizer(SlicedMuon, matrices)
        parallel.optimizer(AdamW, model.parameters())
        parallel.optimizer(Same, model.parameters(), elementwise=True)

    minidist.run(program, 2 * dp)
