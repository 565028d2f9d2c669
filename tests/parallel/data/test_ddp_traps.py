"""What real programs do to a wrapped model: it goes right, or one clear sentence says why not; it
never hangs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from data_parallel import VARIANTS, ZEROS, Zero, largest_difference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minidist
from minidist.full import DDP, FSDP, DataParallel, ZeRO1, ZeRO2
from minidist.full.comm import Communicator
from minidist.full.ddp.compress.compressed import CompressedDDP
from minidist.further import ShardedOptimizer, compressor_of

all_variants = pytest.mark.parametrize("variant", VARIANTS)


class Branches(nn.Module):
    """Three layers, of which each call uses those it is told to."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(3)
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=draws)

    def forward(self, x: Tensor, *used: int) -> Tensor:
        for index in used:
            x = self.layers[index](x)
        return x


def rows(rank: int) -> Tensor:
    """This rank's rows of the batch, a different one each."""
    return torch.randn(
        2, 4, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64
    )


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def close(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    """Both have the same gradients, and the same of them are None."""
    return all((a is None) == (b is None) for a, b in zip(ours, theirs, strict=True)) and all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-12)
        for a, b in zip(ours, theirs, strict=True)
        if a is not None and b is not None
    )


def single_buckets(variant: type[DataParallel]) -> dict[str, Any]:
    return {"bucket_bytes": 1, "first_bucket_bytes": 1} if variant is DDP else {}


# ---- parameters that get no gradient ----

Plan = list[list[tuple[int, ...]]]  # for each step, for each rank: which layers it uses
NEVER: Plan = [[(0, 1), (0, 1)]] * 3
ONE_RANK_ONLY: Plan = [[(0, 1), (0, 2)], [(0, 1, 2), (0, 1)], [(1,), (0,)]]
CHANGING: Plan = [[(0, 1, 2), (0, 1)], [(1,), (1, 0)], [(2,), (2,)]]


def train_branches(model: nn.Module, plan: Plan, ranks: list[int], zero: Zero) -> dict[str, Tensor]:
    """Train on the rows of `ranks`; weight decay tells a gradient that is None from one that is
    zero.
    """
    options = {"lr": 0.05, "weight_decay": 0.3}
    optimizer = (
        model.optimizer(torch.optim.AdamW, **options)
        if isinstance(model, ZeRO1 | FSDP)
        else torch.optim.AdamW(model.parameters(), **options)
    )
    for step in plan:
        zero(model, optimizer)
        loss = sum(
            (model(rows(rank), *step[rank]).square().sum() for rank in ranks), torch.zeros(())
        )
        loss.backward()
        if isinstance(model, DataParallel):
            model.synchronize()
        optimizer.step()
    if isinstance(model, FSDP):
        model.unwrap()
    return {
        name.removeprefix("module."): parameter.detach()
        for name, parameter in model.named_parameters()
    }


@all_variants
@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize(
    "plan", [NEVER, ONE_RANK_ONLY, CHANGING], ids=["never", "one rank only", "changing"]
)
def test_what_is_unused_stays_as_in_the_serial_run(
    variant: type[DataParallel], zero: Zero, plan: Plan
) -> None:
    def program(comm: Communicator) -> dict[str, Tensor]:
        wrapped = variant(
            Branches(comm.rank), comm, op="sum", unused=True, **single_buckets(variant)
        )
        return train_branches(wrapped, plan, [comm.rank], zero)

    expected = train_branches(Branches(0), plan, [0, 1], zero)
    for found in minidist.run(program, 2):
        assert largest_difference(found, expected) <= 1e-9


@pytest.mark.parametrize("variant", [DDP, ZeRO1, ZeRO2, FSDP])
@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_a_gradient_that_was_made_zeros_is_still_one(
    variant: type[DataParallel], whose: str
) -> None:
    def to_zeros(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        {"model": model, "optimizer": optimizer}[whose].zero_grad(set_to_none=False)

    def program(comm: Communicator) -> dict[str, Tensor]:
        wrapped = variant(Branches(comm.rank), comm, op="sum", unused=True)
        return train_branches(wrapped, plan, [comm.rank], to_zeros)

    plan: Plan = [[(0, 1), (0, 1)], [(0,), (0,)], [(1, 2), (1, 2)]]
    expected = train_branches(Branches(0), plan, [0, 1], to_zeros)
    for found in minidist.run(program, 2):
        assert largest_difference(found, expected) <= 1e-9


@all_variants
def test_a_parameter_nobody_used_keeps_no_gradient_and_one_that_anybody_used_has_it(
    variant: type[DataParallel],
) -> None:
    def program(comm: Communicator) -> list[bool]:
        model = Branches()
        wrapped = variant(model, comm, op="sum", unused=True)
        wrapped(rows(0), *((0, 1) if comm.rank == 2 else (0,))).sum().backward()
        wrapped.synchronize()
        return [gradient is None for gradient in gradients(model)]

    assert minidist.run(program, 3) == [[False, False, True]] * 3


@all_variants
def test_a_step_before_any_backward_changes_nothing(variant: type[DataParallel]) -> None:
    """As some loops have it that make the optimizer's state at once."""

    def program(comm: Communicator) -> None:
        model = variant(Branches(), comm, op="sum")
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3).step()
        for parameter, unchanged in zip(model.parameters(), Branches().parameters(), strict=True):
            assert parameter.grad is None and torch.equal(parameter, unchanged)

    minidist.run(program, 2)


@all_variants
def test_unless_announced_an_unused_parameter_is_an_error_that_names_it(
    variant: type[DataParallel],
) -> None:
    def program(comm: Communicator) -> None:
        wrapped = variant(Branches(), comm, op="sum")
        wrapped(rows(0), *((0, 1, 2) if comm.rank == 0 else (0, 2))).sum().backward()
        wrapped.synchronize()

    sentence = r"rank 1: no gradient came for layers\.1\.weight: .*unused=True"
    with pytest.raises(RuntimeError, match=sentence):
        minidist.run(program, 2)


@all_variants
def test_a_model_without_anything_to_train(variant: type[DataParallel]) -> None:
    def program(comm: Communicator) -> float:
        wrapped = variant(nn.Linear(2, 1).requires_grad_(False), comm, op="sum", unused=True)
        x = torch.ones(1, 2, requires_grad=True)
        wrapped(x).sum().backward()
        wrapped.synchronize()
        return float(wrapped.module.weight[0, 0])

    first, second = minidist.run(program, 2)
    assert first == second


# ---- several backward passes ----


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize(
    "quiet", [(False, False), (False, True, False), (True, False, False)], ids=str
)
def test_gradients_that_were_summed_already_are_summed_once(
    op: str, zero: Zero, quiet: tuple[bool, ...]
) -> None:
    def steps(model: nn.Module, ranks: list[int]) -> list[Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            zero(model, optimizer)
            for number, without_sync in enumerate(quiet):
                if isinstance(model, DDP):
                    model.expected.synchronising = not without_sync
                loss = sum((model(rows(rank), number, 2).sum() for rank in ranks), torch.zeros(()))
                (loss / len(ranks) if op == "mean" else loss).backward()
            optimizer.step()
        return gradients(model)

    def program(comm: Communicator) -> list[Tensor | None]:
        wrapped = DDP(Branches(comm.rank), comm, op, unused=True, **single_buckets(DDP))
        return steps(wrapped, [comm.rank])

    expected = steps(Branches(0), [0, 1, 2])
    if zero is not ZEROS[1]:
        assert (expected[1] is None) == (len(quiet) < 2)
    for found in minidist.run(program, 3):
        assert close(found, expected)


@all_variants
def test_one_backward_through_two_forwards_and_a_retained_graph(
    variant: type[DataParallel],
) -> None:
    def step(model: nn.Module, ranks: list[int]) -> list[Tensor | None]:
        loss = sum((model(model(rows(rank), 0, 1), 2, 0).sum() for rank in ranks), torch.zeros(()))
        loss.backward(retain_graph=True)
        loss.backward()
        if isinstance(model, DataParallel):
            model.synchronize()
        return gradients(model)

    expected = step(Branches(0), [0, 1])
    for found in minidist.run(
        lambda comm: step(variant(Branches(comm.rank), comm, op="sum"), [comm.rank]), 2
    ):
        assert close(found, expected)


@all_variants
def test_gradients_replaced_by_hand_are_reduced(variant: type[DataParallel]) -> None:
    def program(comm: Communicator) -> list[Tensor | None]:
        model = Branches()
        wrapped = variant(model, comm, op="sum", unused=True)
        with wrapped.no_sync():
            wrapped(rows(0), 0, 1).sum().backward()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, comm.rank + 1.0)
        (wrapped(rows(0), 0).sum() * 0).backward()
        wrapped.synchronize()
        return gradients(model)

    for found in minidist.run(program, 2):
        assert close(found, [torch.full((4, 4), 3.0, dtype=torch.float64)] * 3)


class Explode(torch.autograd.Function):
    """The identity, with a mistake in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("a mistake")


def explode(wrapped: DDP, used_after: tuple[int, ...]) -> None:
    """Have a backward raise after it came through the layers `used_after`."""
    with pytest.raises(ArithmeticError):
        wrapped(Explode.apply(wrapped(rows(0), 0)), *used_after).sum().backward()


@pytest.mark.parametrize("used_after", [(), (1,), (2,), (1, 2)], ids=str)
def test_alone_the_step_after_a_backward_that_raised_is_a_clean_one(
    used_after: tuple[int, ...],
) -> None:
    def program(comm: Communicator) -> None:
        wrapped = DDP(Branches(), comm, op="sum", **single_buckets(DDP))
        explode(wrapped, used_after)
        wrapped.zero_grad()
        wrapped(rows(0), 0, 1, 2).sum().backward()
        serial = Branches()
        serial(rows(0), 0, 1, 2).sum().backward()
        assert close(gradients(wrapped.module), gradients(serial))

    minidist.run(program, 1)


@pytest.mark.parametrize("used_after", [(1,), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("everywhere", [True, False], ids=["on all ranks", "on one rank"])
def test_in_company_the_step_after_a_backward_that_raised_is_refused(
    used_after: tuple[int, ...], everywhere: bool
) -> None:
    def program(comm: Communicator) -> None:
        wrapped = DDP(Branches(), comm, op="sum", **single_buckets(DDP))
        if everywhere or comm.rank == 1:
            explode(wrapped, used_after)
        else:
            wrapped(rows(0), 0, 1, 2).sum().backward()
        wrapped.zero_grad()
        wrapped(rows(0), 0, 1, 2).sum().backward()

    with pytest.raises(RuntimeError, match=r"an earlier backward of rank \d raised .* end the job"):
        minidist.run(program, 2)


def test_a_rank_that_raises_in_backward_ends_the_run() -> None:
    def program(comm: Communicator) -> None:
        wrapped = DDP(Branches(), comm, op="sum", **single_buckets(DDP))
        x = wrapped(rows(0), 0)
        wrapped(Explode.apply(x) if comm.rank == 1 else x, 1, 2).sum().backward()

    with pytest.raises(ArithmeticError, match="a mistake"):
        minidist.run(program, 3)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_graphs_of_gradients_are_refused() -> None:
    def program(comm: Communicator) -> None:
        DDP(nn.Linear(2, 1), comm, op="sum")(torch.ones(1, 2)).square().sum().backward(
            create_graph=True
        )

    with pytest.raises(RuntimeError, match="without create_graph=True"):
        minidist.run(program, 2)


# ---- checkpointing ----


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("all_of_it", [True, False], ids=["whole model", "inner layers"])
def test_recomputed_layers(reentrant: bool, all_of_it: bool) -> None:
    def step(model: nn.Module, ranks: list[int]) -> list[Tensor | None]:
        total = torch.zeros(())
        for rank in ranks:
            x = rows(rank).requires_grad_()
            x = checkpoint(model, model(x, 0) if not all_of_it else x, 1, use_reentrant=reentrant)
            x = checkpoint(model, x, 0, use_reentrant=reentrant) if all_of_it else x
            total = (
                total
                + (
                    checkpoint(model, x, 2, use_reentrant=reentrant) if all_of_it else model(x, 2)
                ).sum()
            )
        total.backward()
        return gradients(model)

    expected = step(Branches(0), [0, 1])
    for found in minidist.run(
        lambda comm: step(DDP(Branches(comm.rank), comm, op="sum", unused=True), [comm.rank]), 2
    ):
        assert close(found, expected)


def test_a_shared_layer_that_gets_its_gradient_in_pieces_is_named() -> None:
    def program(comm: Communicator) -> None:
        wrapped = DDP(Branches(), comm, op="sum")
        x = checkpoint(wrapped, wrapped(rows(0), 0), 1, use_reentrant=True)
        wrapped(checkpoint(wrapped, x, 1, use_reentrant=True), 2).sum().backward()

    with pytest.raises(
        RuntimeError, match=r"a second gradient came for layers\.1\.weight .*use_reentrant=False"
    ):
        minidist.run(program, 2)


def step_alone(ddp: DDP, optimizer: torch.optim.Optimizer) -> None:
    with ddp.no_sync():
        ddp(rows(ddp.comm.rank), 0).sum().backward()
    optimizer.step()


def step_by_hand(ddp: DDP, optimizer: torch.optim.Optimizer) -> None:
    weight = ddp.module.layers[0].weight
    optimizer.zero_grad()
    (weight.grad,) = torch.autograd.grad(ddp(rows(ddp.comm.rank), 0).sum(), [weight])
    optimizer.step()


@pytest.mark.parametrize("wrong", (step_alone, step_by_hand))
@pytest.mark.parametrize("compression", ("", "topk:0.5"))
def test_a_step_by_a_gradient_of_one_rank_is_refused(wrong: Any, compression: str) -> None:
    def program(comm: Communicator) -> None:
        kind: Any = DDP
        if compression:
            kind = partial(CompressedDDP, compress=compressor_of(compression))
        ddp = kind(Branches(), comm, op="sum", unused=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(2):
            ddp(rows(comm.rank), 0).sum().backward()
            weight = ddp.module.layers[0].weight
            weight.grad = weight.grad.clamp(-1, 1)  # made of the sum, and so the same on all ranks
            optimizer.step()
        before = ddp.module.layers[0].weight.clone()
        with pytest.raises(ValueError, match=r"0\.weight has a gradient that nobody has red"):
            wrong(ddp, optimizer)
        assert torch.equal(before, ddp.module.layers[0].weight)
        ddp.unwrap()
        optimizer.step()  # nobody's business any more

    minidist.run(program, 2)


def convert_and_back(ddp: DDP) -> None:
    ddp.zero_grad()
    ddp.module.float().double()


def give_data(ddp: DDP) -> None:
    ddp.module.layers[0].weight.grad.data = torch.ones(4, 4)


@pytest.mark.parametrize("change", (convert_and_back, give_data))
def test_a_model_that_is_converted_and_back_says_so(change: Any) -> None:
    def program(comm: Communicator) -> None:
        ddp = DDP(Branches(), comm, op="sum", unused=True)
        ddp(rows(0), 0).sum().backward()
        change(ddp)
        ddp(rows(0), 0).sum().backward()

    with pytest.raises(RuntimeError, match="was moved or converted and back, or by grad"):
        minidist.run(program, 2)


class SparseRows(nn.Linear):
    """Looks rows up by torch's function, which no wrapper sees."""

    def forward(self, row: Tensor) -> Tensor:
        return nn.functional.embedding(row, self.weight, sparse=True)


@pytest.mark.parametrize("kind", (*VARIANTS, ZeRO1, FSDP, ShardedOptimizer))
def test_a_sparse_gradient_is_refused_wherever_it_comes_from(kind: Any) -> None:
    def program(comm: Communicator) -> None:
        model = SparseRows(3, 4, bias=False)
        if kind is ShardedOptimizer:
            alone = ShardedOptimizer(model.parameters(), torch.optim.SGD, comm)
            model(torch.tensor([1])).sum().backward()
            alone.step()
        wrapped = kind(model, comm, "sum")
        wrapped(torch.tensor([comm.rank])).sum().backward()
        wrapped.synchronize()

    with pytest.raises(RuntimeError, match=f"0? is sparse, .* and {kind.__name__} reduces whole"):
        minidist.run(program, 2)
