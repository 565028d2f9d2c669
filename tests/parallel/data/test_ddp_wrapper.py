"""The wrapper around a model: what it refuses, what it keeps equal, and how it behaves as a
module.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_parallel import VARIANTS
from torch import Tensor, nn

import minidist
from minidist.full import DDP, FSDP, DataParallel, ZeRO1, ZeRO2
from minidist.full.comm import Communicator, MismatchError
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import cross_entropy_sum
from minidist.further import Recipe, ZeROPlusPlus, parallelize

all_variants = pytest.mark.parametrize("variant", VARIANTS)


def small(seed: int = 0) -> nn.Sequential:
    """A model with buffers of two dtypes, frozen and trained parameters, in modules within
    modules.
    """
    draws = torch.Generator().manual_seed(seed)
    inner = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU())
    model = nn.Sequential(inner, nn.Linear(6, 2))
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.copy_(torch.rand(tensor.shape, generator=draws) * 9)
    model[1].bias.requires_grad_(False)
    return model


def state(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]


def x(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


# ---- models that differ ----


def with_dtype(model: nn.Sequential) -> nn.Module:
    return model.double()


def with_another_layer(model: nn.Sequential) -> nn.Module:
    return model.append(nn.Linear(2, 2))


def with_another_shape(model: nn.Sequential) -> nn.Module:
    model[1] = nn.Linear(6, 3)
    return model


def with_something_frozen(model: nn.Sequential) -> nn.Module:
    model[1].weight.requires_grad_(False)
    return model


def without_a_buffer(model: nn.Sequential) -> nn.Module:
    del model[0][1].num_batches_tracked
    return model


DIFFERENCES: list[tuple[Callable[[nn.Sequential], nn.Module], str]] = [
    (with_dtype, r"0\.0\.weight .*float32.* 0\.0\.weight .*float64"),
    (with_another_layer, r"2\.weight"),
    (with_another_shape, r"1\.weight \[2, 6\].* 1\.weight \[3, 6\]"),
    (with_something_frozen, r"1\.weight.* trained.* fixed"),
    (without_a_buffer, r"num_batches_tracked.*nothing|nothing.*num_batches_tracked"),
]


@all_variants
@pytest.mark.parametrize(("change", "sentence"), DIFFERENCES)
def test_every_rank_is_told_that_models_differ(
    variant: type[DataParallel], change: Callable[[nn.Sequential], nn.Module], sentence: str
) -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(
            MismatchError,
            match=rf"rank 0 and rank 2 of 3 have different models: .*{sentence}",
        ):
            variant(change(small()) if comm.rank == 2 else small(), comm, op="sum")

    minidist.run(program, 3)


@all_variants
def test_threads_that_share_a_model_are_told(variant: type[DataParallel]) -> None:
    shared = small()
    with pytest.raises(
        ValueError, match="the ranks are threads, and share one model: build it in the function"
    ):
        minidist.run(lambda comm: variant(shared, comm, op="sum"), 2)


@pytest.mark.parametrize("variant", [*VARIANTS, FSDP])
def test_complex_numbers_do_not_travel(variant: type[DataParallel]) -> None:
    def program(comm: Communicator) -> str:
        with pytest.raises(
            TypeError, match=r"^weight is torch.complex64, .* torch.view_as_real"
        ) as caught:
            variant(nn.Linear(2, 2, dtype=torch.complex64), comm, op="sum")
        return str(caught.value)

    assert len(set(minidist.run(program, 2))) == 1


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("variant", [*VARIANTS, ZeRO1, ZeRO2, FSDP, ZeROPlusPlus])
def test_how_gradients_are_joined_is_to_be_said(variant: type[DataParallel], ranks: int) -> None:
    """Either default would be silently wrong for half of all loops; on one rank, too, the habit is
    asked for.
    """

    def program(comm: Communicator) -> str:
        before, sent = state(model := small(comm.rank)), comm.traffic.messages
        with pytest.raises(ValueError, match="op='max' is unknown to") as unknown:
            variant(model, comm, op="max")
        with pytest.raises(
            ValueError, match=f"{variant.__name__} has no default for op="
        ) as missing:
            variant(model, comm)
        for caught in (unknown, missing):
            assert (
                "op=\"mean\" if each rank's loss is the mean over its own batch, as in torch's DDP"
                in str(caught.value)
            )
            assert (
                'op="sum" if each rank divides its loss by the number of tokens of all ranks'
                in str(caught.value)
            )
        assert all(map(torch.equal, state(model), before)) and comm.traffic.messages == sent
        variant(model, comm, op="mean")
        return str(missing.value)

    assert len(set(minidist.run(program, ranks))) == 1


def by_parallelize(model: nn.Module, comm: Communicator, op: str) -> None:
    parallelize(model, Mesh(comm, Layout(dp=2)), Recipe(), cross_entropy_sum)


@pytest.mark.parametrize("variant", (*VARIANTS, FSDP, by_parallelize))
@pytest.mark.parametrize(
    "layer, said",
    (
        (nn.SyncBatchNorm(3), "asks torch's group of ranks, and there is none"),
        (nn.Embedding(5, 3, max_norm=1.0), "would normalise only the rows that its batch uses"),
    ),
    ids=("norm", "embedding"),
)
def test_layers_that_would_differ_between_ranks_are_refused(
    variant: Any, layer: nn.Module, said: str
) -> None:
    def program(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(3, 3), copy.deepcopy(layer))
        with pytest.raises(ValueError, match=f"1 (has|is) .*{said}"):
            variant(model, comm, "sum")

    minidist.run(program, 2)


# ---- what is kept equal ----


@all_variants
def test_ranks_start_with_the_parameters_and_buffers_of_rank_0(variant: type[DataParallel]) -> None:
    def program(comm: Communicator) -> list[Tensor]:
        model = small(seed=comm.rank)
        variant(model, comm, op="sum")
        return state(model)

    expected = state(small(seed=0))
    for found in minidist.run(program, 3):
        assert all(map(torch.equal, found, expected))


@all_variants
def test_buffers_follow_rank_0_in_training_and_in_the_evaluation_after_it(
    variant: type[DataParallel],
) -> None:
    def program(comm: Communicator) -> list[Tensor]:
        wrapped = variant(small(seed=comm.rank), comm, op="sum")
        statistics = wrapped.module[0][1]
        wrapped(x(comm.rank))
        drifted = statistics.running_mean.clone()  # each rank saw other rows
        wrapped.eval()
        wrapped(x(comm.rank))
        evaluated = statistics.running_mean.clone()
        before = comm.traffic.bytes
        wrapped(x(comm.rank))
        wrapped.train()
        with wrapped.no_sync():
            wrapped(x(comm.rank))
        assert comm.traffic.bytes == before
        statistics.running_mean.copy_(drifted)
        statistics.momentum = 0.0
        wrapped(x(comm.rank))
        return [drifted, statistics.running_mean, evaluated, statistics.num_batches_tracked]

    (first, *kept, count), (second, *followed, other_count) = minidist.run(program, 2)
    assert not torch.equal(first, second)
    assert all(torch.equal(each, first) for each in [*kept, *followed])
    assert int(count) == int(other_count)


def oddly_laid_out(seed: int) -> nn.Sequential:
    """A convolution whose weight lies channels last, and a linear layer whose weight is a
    transposed view.
    """
    draws = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 36, bias=False), nn.Linear(36, 4, bias=False)
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draws)
    model[2].weight = nn.Parameter(model[3].weight.detach().t())
    return model.double().to(memory_format=torch.channels_last)


@all_variants
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_memory_of_any_layout(variant: type[DataParallel]) -> None:
    def image(rank: int) -> Tensor:
        return (torch.arange(12.0).double().reshape(1, 3, 2, 2) + rank).to(
            memory_format=torch.channels_last
        )

    def program(comm: Communicator) -> list[Tensor]:
        wrapped = variant(oddly_laid_out(comm.rank), comm, op="sum")
        wrapped(image(comm.rank)).square().sum().backward()
        wrapped.synchronize()
        return [
            tensor
            for p in wrapped.parameters()
            for tensor in (p.detach(), p.grad)
            if tensor is not None
        ]

    serial = oddly_laid_out(0)
    assert not serial[0].weight.is_contiguous() and not serial[2].weight.is_contiguous()
    serial(torch.cat([image(0), image(1)])).square().sum().backward()
    expected = [
        tensor for p in serial.parameters() for tensor in (p.detach(), p.grad) if tensor is not None
    ]
    for found in minidist.run(program, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


# ---- models that change after they were wrapped ----


def added(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def unfrozen(model: nn.Sequential) -> None:
    model[1].bias.requires_grad_(True)


def replaced(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(torch.zeros(2, 6))


@all_variants
@pytest.mark.parametrize(
    ("change", "name"), [(added, "2.weight"), (unfrozen, "1.bias"), (replaced, "1.weight")]
)
def test_a_parameter_that_nobody_would_reduce(
    variant: type[DataParallel], change: Callable[[nn.Sequential], None], name: str
) -> None:
    def program(comm: Communicator) -> None:
        wrapped = variant(small(), comm, op="sum")
        change(wrapped.module)  # type: ignore[arg-type]
        wrapped.eval()
        wrapped(x(0))  # looking at it is allowed
        wrapped.train()
        with pytest.raises(
            RuntimeError, match=f"parameter {name} was added, replaced, resized or unfrozen after"
        ):
            wrapped(x(0))

    minidist.run(program, 2)


@all_variants
def test_a_parameter_frozen_for_a_while_counts_as_unused(variant: type[DataParallel]) -> None:
    def program(comm: Communicator) -> list[Tensor | None]:
        model = small()
        wrapped = variant(model, comm, op="sum", unused=True)
        for frozen in (True, False):
            wrapped.zero_grad()
            model[1].weight.requires_grad_(not frozen)
            wrapped(x(comm.rank)).sum().backward()
            wrapped.synchronize()
            assert (model[1].weight.grad is None) == frozen
        return [parameter.grad for parameter in wrapped.parameters_to_reduce]

    first, second = minidist.run(program, 2)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(first, second, strict=True))  # type: ignore


@pytest.mark.parametrize(
    ("convert", "trained"),
    [
        (lambda m: m.double(), False),
        (lambda m: m.bfloat16(), False),
        (lambda m: m[2].to(memory_format=torch.channels_last), True),
    ],
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_model_converted_after_it_was_wrapped(
    convert: Callable[[nn.Module], nn.Module], trained: bool, set_to_none: bool
) -> None:
    def program(comm: Communicator) -> None:
        model = nn.Sequential(nn.Unflatten(1, (2, 2, 1)), nn.Flatten(), nn.Conv2d(4, 2, 2))
        ddp = DDP(model, comm, op="sum")
        if trained:
            model[2](torch.ones(1, 4, 3, 3)).sum().backward()
        convert(model)
        ddp.zero_grad(set_to_none)
        model[2](torch.ones(1, 4, 3, 3).to(model[2].weight)).sum().backward()

    with pytest.raises(
        RuntimeError, match=r"moved or converted .* on the model before wrapping it"
    ):
        minidist.run(program, 2)


def test_a_second_ddp_needs_the_first_to_be_taken_off() -> None:
    def program(comm: Communicator) -> Tensor:
        model = nn.Linear(2, 1, bias=False)
        first = DDP(model, comm, op="sum")
        with pytest.raises(ValueError, match="parameter weight belongs to another DDP already"):
            DDP(model, comm, op="sum")
        second = DDP(first.unwrap(), comm, op="sum")
        second(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    for gradient in minidist.run(program, 3):
        assert torch.equal(gradient, torch.full((1, 2), 3.0))


# ---- as a module ----


@all_variants
def test_the_model_inside_can_be_copied_saved_and_loaded(variant: type[DataParallel]) -> None:
    def program(comm: Communicator) -> None:
        model = small()
        wrapped = variant(model, comm, op="sum")
        for copied in (
            copy.deepcopy(wrapped.module),
            pickle.loads(pickle.dumps(wrapped.module)),
            saved(wrapped),
        ):
            before, sent = state(model), comm.traffic.bytes
            assert all(map(torch.equal, state(copied), before))
            copied(x(comm.rank)).sum().backward()  # a copy is on its own
            assert comm.traffic.bytes == sent
            assert all(map(torch.equal, state(model), before))
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(
                TypeError, match=rf"{variant.__name__} belongs to running ranks: .*\.module"
            ):
                attempt(wrapped)

    minidist.run(program, 2)


def saved(wrapped: DataParallel) -> nn.Module:
    """Return a new model, loaded from a file of the wrapped one's state."""
    file = io.BytesIO()
    torch.save(wrapped.module.state_dict(), file)
    file.seek(0)
    model = small(seed=5)
    model.load_state_dict(torch.load(file))
    assert [*wrapped.state_dict()] == [f"module.{name}" for name in model.state_dict()]
    return model


@all_variants
def test_it_is_a_module_among_modules(variant: type[DataParallel]) -> None:
    def program(comm: Communicator) -> Tensor:
        wrapped = variant(small(seed=comm.rank), comm, op="sum")
        whole = nn.Sequential(nn.Identity(), wrapped)
        assert not whole.eval()[1].module[0][1].training and whole.train()[1].module[0][1].training
        names = [name for name, _ in whole.named_parameters()]
        assert names == [f"1.module.{name}" for name, _ in small().named_parameters()]
        whole.zero_grad()
        whole(x(comm.rank)).sum().backward()
        wrapped.synchronize()
        gradient = wrapped.module[1].weight.grad
        assert isinstance(gradient, Tensor)
        return gradient

    first, second = minidist.run(program, 2)
    assert torch.equal(first, second) and first.any()
