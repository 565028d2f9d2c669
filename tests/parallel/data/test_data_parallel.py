"""Data parallelism gives the serial run's numbers: all variants, any number of ranks, batches that
do not divide.
"""

from __future__ import annotations

import copy

import pytest
import torch
from data_parallel import (
    CONFIG,
    DROPPING,
    ROWS,
    VARIANTS,
    ZEROS,
    Case,
    Zero,
    build,
    check_parity,
    largest_difference,
    parallel,
    serial,
    wrap,
)
from torch import Tensor, nn

import minidist
from minidist.full import DDP, DataParallel, clip_by_global_norm
from minidist.full.comm import Communicator
from minidist.full.ddp.sampler import share
from minidist.full.model import cross_entropy_sum

all_variants = pytest.mark.parametrize("variant", VARIANTS)


def test_the_case_is_a_hard_one() -> None:
    model = build(CONFIG, seed=0)
    assert model.head.weight is model.embedding.weight
    assert sum(not parameter.requires_grad for parameter in model.parameters()) == 1
    assert not torch.equal(model.norm.weight, build(CONFIG, seed=1).norm.weight)
    rows = [len(range(*share(rows, 7, rank).indices(rows))) for rows in ROWS for rank in range(7)]
    assert 0 in rows and 1 in rows
    assert (
        largest_difference(
            serial(CONFIG), {name: p.detach() for name, p in model.named_parameters()}
        )
        > 0.01
    ), "training moves the weights"
    assert largest_difference(serial(DROPPING), serial(CONFIG)) > 0.01, "dropout makes a difference"


@all_variants
@pytest.mark.parametrize(
    "ranks", [1, 2, 3, 5, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (4, 7))]
)
def test_parity(variant: type[DataParallel], ranks: int) -> None:
    check_parity(minidist.run(lambda comm: parallel(comm, Case(variant)), ranks), CONFIG)


@all_variants
@pytest.mark.parametrize("zero", ZEROS)
def test_parity_with_accumulation_however_gradients_are_zeroed(
    variant: type[DataParallel], zero: Zero
) -> None:
    case = Case(variant, microbatches=3, zero=zero)
    check_parity(minidist.run(lambda comm: parallel(comm, case), 3), CONFIG)


@all_variants
def test_parity_with_dropout(variant: type[DataParallel]) -> None:
    case = Case(variant, DROPPING, microbatches=2)
    check_parity(minidist.run(lambda comm: parallel(comm, case), 4), DROPPING)


def local_mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """As other people's loops have it: divided by the tokens at hand."""
    return cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()


@all_variants
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_mean_is_what_loops_that_divide_by_the_local_number_need(
    variant: type[DataParallel], ranks: int
) -> None:
    tokens = torch.randint(19, (12, 9), generator=torch.Generator().manual_seed(3))

    def program(comm: Communicator) -> dict[str, Tensor]:
        model = build(CONFIG, seed=comm.rank)
        wrapped = wrap(model, comm, Case(variant), op="mean")
        local_mean_loss(wrapped, tokens[share(12, comm.size, comm.rank)]).backward()
        wrapped.synchronize()
        return gradients(model)

    expected = build(CONFIG, seed=0)
    local_mean_loss(expected, tokens).backward()
    for found in minidist.run(program, ranks):
        assert largest_difference(found, gradients(expected)) <= 1e-9


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


# ---- lower precision: as close to the float64 gradients as the serial run of that precision ----


def summed_loss(model: nn.Module, tokens: Tensor, scale: float) -> Tensor:
    return cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]) * scale


@all_variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_at_lower_precision(variant: type[DataParallel], dtype: torch.dtype) -> None:
    tokens = torch.randint(19, (9, 9), generator=torch.Generator().manual_seed(4))
    exact, rounded = build(CONFIG, seed=0), build(CONFIG, seed=0).to(dtype)
    exact.load_state_dict(rounded.state_dict())
    for model in (exact, rounded):
        summed_loss(model, tokens, 1 / 72).backward()

    def program(comm: Communicator) -> dict[str, Tensor]:
        model = build(CONFIG, seed=comm.rank).to(dtype)
        wrapped = wrap(model, comm, Case(variant))
        summed_loss(wrapped, tokens[share(9, comm.size, comm.rank)], 1 / 72).backward()
        wrapped.synchronize()
        return gradients(model)

    for found in minidist.run(program, 3):
        assert all(gradient.dtype == dtype for gradient in found.values())
        assert distance(found, gradients(exact)) <= 2 * distance(
            gradients(rounded), gradients(exact)
        )


def distance(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative distance of two sets of gradients."""
    apart = sum(
        float((ours[name].double() - gradient).square().sum()) for name, gradient in exact.items()
    )
    return (apart / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5


def test_parameters_of_several_precisions_in_one_model() -> None:
    def program(comm: Communicator) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 2).double())
        wrapped = DDP(model, comm, op="sum")
        hidden = model[1](model[0](torch.full((1, 4), comm.rank + 1.0)).bfloat16())
        model[2](hidden.double()).sum().backward()
        assert [bucket.flat.dtype for bucket in wrapped.reducer.buckets] == [
            torch.float64,
            torch.bfloat16,
            torch.float32,
        ]
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    first, second = minidist.run(program, 2)
    assert len(first) == 6 and all(map(torch.equal, first, second))
    assert torch.equal(first[5], torch.full((2,), 2.0, dtype=torch.float64)), (
        "the last bias: one from each rank"
    )


# ---- clipping ----


def test_every_rank_clips_alike_without_a_message() -> None:
    tokens = torch.randint(19, (5, 9), generator=torch.Generator().manual_seed(6))
    expected = build(CONFIG, seed=0)
    summed_loss(expected, tokens, 1.0).backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)

    def program(comm: Communicator) -> tuple[Tensor, dict[str, Tensor], int]:
        model = build(CONFIG, seed=comm.rank)
        wrapped = wrap(model, comm, Case())
        summed_loss(wrapped, tokens[share(5, comm.size, comm.rank)], 1.0).backward()
        before = comm.traffic.messages
        return (
            clip_by_global_norm(model.parameters(), 0.5),
            gradients(model),
            comm.traffic.messages - before,
        )

    for found, clipped, messages in minidist.run(program, 3):
        assert float(found) == pytest.approx(float(norm), rel=1e-12)
        assert largest_difference(clipped, gradients(expected)) <= 1e-9
        assert messages == 0


def some_parameters(dtype: torch.dtype, scale: float = 1.0) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(8)
    parameters = [
        nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 4), (7,), (), (0,), (2,))
    ]
    for parameter in parameters[:-1]:  # the last has no gradient
        parameter.grad = (torch.randn(parameter.shape, generator=draws) * scale).to(dtype)
    return parameters


@pytest.mark.parametrize("limit", [0.1, 3.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_clipping_equals_torchs(dtype: torch.dtype, limit: float) -> None:
    ours = some_parameters(dtype)
    theirs = copy.deepcopy(ours)
    for mine, its in zip(ours, theirs, strict=True):
        its.grad = None if mine.grad is None else mine.grad.clone()
    norm, expected = (
        clip_by_global_norm(iter(ours), limit),
        torch.nn.utils.clip_grad_norm_(theirs, limit),
    )
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(norm, expected, rtol=tolerance, atol=0, check_dtype=False)
    for mine, its in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=tolerance, atol=0)
    assert ours[-1].grad is None


def test_a_norm_that_float16_cannot_hold_is_found() -> None:
    parameters = some_parameters(torch.float16, scale=20_000)
    norm = clip_by_global_norm(parameters, 1.0)
    assert 65_504 < float(norm) < 1e6
    assert float(clip_by_global_norm(parameters, 0)) == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
def test_what_cannot_be_scaled_is_left_alone_and_told(poison: float) -> None:
    parameters = some_parameters(torch.float32)
    assert parameters[1].grad is not None
    parameters[1].grad[2] = poison
    before = [
        None if parameter.grad is None else parameter.grad.clone() for parameter in parameters
    ]
    assert not clip_by_global_norm(parameters, 1.0).isfinite()
    for parameter, gradient in zip(parameters[:-1], before[:-1], strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("limit", [0.0, float("inf")])
def test_without_a_limit_the_norm_is_only_measured(limit: float) -> None:
    parameters = some_parameters(torch.float64)
    first = clip_by_global_norm(parameters, limit)
    assert float(first) > 1 and torch.equal(first, clip_by_global_norm(parameters, limit))


def test_clipping_nothing_and_by_nonsense() -> None:
    assert float(clip_by_global_norm([], 1.0)) == 0
    for limit in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"limit={limit} is no bound"):
            clip_by_global_norm([], limit)
