"""ZeRO 1 and 2: the serial numbers, from a part of the state, for the bytes of DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from data_parallel import (
    CONFIG,
    DROPPING,
    ZEROS,
    Case,
    Zero,
    build,
    check_parity,
    parallel,
    train,
    wrap,
)
from test_ddp_traps import Branches, rows
from torch import Tensor, nn

import minidist
from minidist.full import DDP, FSDP, ZeRO1, ZeRO2, clip_by_global_norm, placement_of
from minidist.full.comm import Communicator
from minidist.full.fsdp.policy import MixedPrecision
from minidist.full.model import cross_entropy_sum
from minidist.full.precision.masters import MasterWeights

STAGES = (ZeRO1, ZeRO2)
EACH = pytest.mark.parametrize("stage", STAGES)


@EACH
@pytest.mark.parametrize("ranks", (1, 2, 3, pytest.param(4, marks=pytest.mark.soak), 5))
@pytest.mark.parametrize("config", (CONFIG, DROPPING), ids=("plain", "dropout"))
def test_parity_with_the_serial_run(stage: type[ZeRO1], ranks: int, config: Any) -> None:
    check_parity(minidist.run(lambda comm: parallel(comm, Case(stage, config)), ranks), config)


@EACH
@pytest.mark.parametrize("zero", ZEROS, ids=lambda zero: zero.__name__)
@pytest.mark.parametrize("microbatches", (1, pytest.param(2, marks=pytest.mark.soak), 3))
def test_parity_whoever_zeroes_and_however_many_microbatches(
    stage: type[ZeRO1], zero: Zero, microbatches: int
) -> None:
    case = Case(stage, microbatches=microbatches, zero=zero)
    check_parity(minidist.run(lambda comm: parallel(comm, case), 3), CONFIG)


def step(model: nn.Module, rank: int, rows: int = 2) -> Tensor:
    """Run one forward and backward."""
    tokens = torch.randint(19, (rows, 9), generator=torch.Generator().manual_seed(rank))
    loss = cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    return loss


@EACH
@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_state_is_a_part_and_bytes_are_those_of_ddp(stage: type[ZeRO1], ranks: int) -> None:
    def program(comm: Communicator) -> tuple[int, int, int]:
        model = wrap(build(CONFIG, comm.rank), comm, Case(stage))
        optimizer = model.optimizer(torch.optim.AdamW)  # type: ignore[operator]
        before = comm.traffic.bytes
        step(model, comm.rank)
        optimizer.step()
        held = sum(
            t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim()
        )
        total = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        return comm.traffic.bytes - before, held, total

    sent, held, total = zip(*minidist.run(program, ranks), strict=True)
    assert sum(held) == 2 * total[0]  # nobody's state is anybody else's
    # an element more a bucket, where it does not divide
    assert max(held) <= 2 * total[0] / ranks + 16 * 8 * 10
    assert sum(sent) == 2 * (ranks - 1) * total[0]


@pytest.mark.parametrize("stage, most", ((ZeRO1, None), (ZeRO2, 2)))
def test_only_stage_2_frees_gradients(stage: type[ZeRO1], most: int | None) -> None:
    def program(comm: Communicator) -> tuple[list[int], int, int]:
        model = wrap(build(CONFIG, comm.rank), comm, Case(stage))
        assert isinstance(model, ZeRO1)
        largest = max(sum(p.nbytes for p in bucket.parameters) for bucket in model.reducer.buckets)
        during: list[int] = []

        def look(_: Tensor) -> None:
            during.append(
                sum(p._grad.nbytes for p in model.parameters_to_reduce if p._grad is not None)
            )

        for parameter in model.parameters_to_reduce:
            parameter.register_post_accumulate_grad_hook(look)
        step(model, comm.rank)
        own = [p._grad for p in model.parameters_to_reduce]  # `grad` shows what the slices have
        return during, sum(gradient.nbytes for gradient in own if gradient is not None), largest

    for during, after, largest in minidist.run(program, 2):
        total = sum(p.nbytes for p in build(CONFIG, 0).parameters() if p.requires_grad)
        if most is None:
            assert after == total
        else:
            # the other bucket is the one that travels
            assert after == 0 and max(during) <= largest < total / 2


@EACH
def test_a_second_backward_adds_to_the_first_though_both_were_reduced(stage: type[ZeRO1]) -> None:
    def program(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        model = wrap(build(CONFIG, 0), comm, Case(stage))
        found = []
        for _ in range(2):
            step(model, comm.rank)
            found.append([piece.grad.clone() for piece in model.slices])  # type: ignore[union-attr]
        return found[0], found[1]

    for once, twice in minidist.run(program, 2):
        assert all(
            torch.allclose(b, 2 * a, rtol=1e-12, atol=0) for a, b in zip(once, twice, strict=True)
        )


@EACH
def test_room_for_reduced_gradients_is_kept_so_what_is_held_does_not_depend_on_the_stream(
    stage: type[ZeRO1],
) -> None:
    def program(comm: Communicator) -> list[int]:
        model = wrap(build(CONFIG, 0), comm, Case(stage))
        assert isinstance(model, ZeRO1)
        held = [sum(part.shard.gradient is not None for part in model.shards.values())]
        for zero in (lambda: None, model.zero_grad, lambda: model.zero_grad(set_to_none=False)):
            zero()
            held.append(sum(tensor.nbytes for tensor in model.held()["gradients"]))
            step(model, comm.rank)
        assert held[0] == len(model.shards)
        return held[1:]

    for held in minidist.run(program, 2):
        assert len(set(held)) == 1 and held[0] > 0


@EACH
def test_what_no_rank_has_used_is_not_decayed(stage: type[ZeRO1]) -> None:
    def program(comm: Communicator) -> list[Tensor]:
        model = stage(Branches(), comm, op="sum", unused=True)
        optimizer = model.optimizer(torch.optim.AdamW, weight_decay=0.3)
        model(rows(comm.rank), 0).sum().backward()
        optimizer.step()
        return [parameter.detach() for parameter in model.module.parameters()]

    before = list(Branches().parameters())
    for used, *others in minidist.run(program, 2):
        assert not torch.equal(used, before[0]) and all(map(torch.equal, others, before[1:]))


@EACH
def test_optimizer_state_of_any_number_of_ranks(stage: type[ZeRO1]) -> None:
    def state(comm: Communicator, given: Any = None) -> Any:
        torch.manual_seed(0)
        model = wrap(build(CONFIG, 0), comm, Case(stage))
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)  # type: ignore[operator]
        if given:
            optimizer.load_state_dict(given)
            for piece in model.slices:  # type: ignore[union-attr]
                placement = placement_of(piece).slice
                assert placement is not None and len(optimizer.state[piece]["exp_avg"]) == len(
                    piece
                )
        else:
            step(model, 0, rows=2)
            optimizer.step()
        return optimizer.state_dict()

    written = minidist.run(state, 3)[1]
    read = minidist.run(lambda comm: state(comm, written), 2)[0]
    plain = build(CONFIG, 0)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    for index, held in written["state"].items():
        assert torch.equal(held["exp_avg"], read["state"][index]["exp_avg"])
        assert held["exp_avg"].shape == trained[index].shape
    unsharded = torch.optim.AdamW(trained, lr=0.01)
    unsharded.load_state_dict(written)
    step(plain, 0)
    unsharded.step()


@EACH
def test_clipping_uses_the_norm_of_all_shards(stage: type[ZeRO1]) -> None:
    def program(comm: Communicator) -> tuple[float, float, float]:
        model, reference = (
            wrap(build(CONFIG, 0), comm, Case(stage)),
            DDP(build(CONFIG, 0), comm, op="sum"),
        )
        step(model, comm.rank), step(reference, comm.rank)
        norm = clip_by_global_norm(model.slices, 0.5)  # type: ignore[union-attr]
        return (
            float(norm),
            float(clip_by_global_norm(reference.parameters(), 0.5)),
            float(
                clip_by_global_norm(model.slices, 0)  # type: ignore[union-attr]
            ),
        )

    for norm, expected, after in minidist.run(program, 3):
        assert norm == pytest.approx(expected, rel=1e-12) and after == pytest.approx(0.5, rel=1e-5)


def test_parameters_are_gathered_while_the_next_forward_runs() -> None:
    def program(comm: Communicator) -> dict[str, Tensor]:
        model = build(CONFIG, comm.rank)
        wrapped = ZeRO1(
            model, comm, op="sum", bucket_bytes=4096, first_bucket_bytes=1024, overlap=True
        )
        train(wrapped, Case(ZeRO1), comm.size, comm.rank)
        assert wrapped.gathering  # the last step's nobody has waited for
        wrapped.wait()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    check_parity(minidist.run(program, 2), CONFIG)


def test_master_values_are_kept_in_float32() -> None:
    def program(comm: Communicator) -> tuple[float, float]:
        model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        wrapped = ZeRO1(model, comm, op="sum")
        optimizer = wrapped.optimizer(MasterWeights, optimizer=torch.optim.SGD, lr=1.0)
        for _ in range(16):
            optimizer.zero_grad()
            (model.weight.float().sum() * 1e-3 / comm.size).backward()
            optimizer.step()
        return float(model.weight.detach().float().mean()), float(
            optimizer.state[wrapped.slices[0]]["master"].mean()
        )

    for rounded, exact in minidist.run(program, 2):
        assert exact == pytest.approx(1 - 16e-3, rel=1e-3)
        # without masters it would stand still at 1
        assert rounded == pytest.approx(exact, rel=2**-8)


@EACH
def test_an_optimizer_over_whole_parameters_is_refused(stage: type[ZeRO1]) -> None:
    def program(comm: Communicator) -> None:
        model = build(CONFIG, 0)
        before = torch.optim.AdamW(model.parameters())
        wrapped = stage(model, comm, op="sum")
        for optimizer in (before, torch.optim.AdamW(model.parameters())):
            with pytest.raises(
                ValueError, match=f"AdamW was built over parameters that {stage.__name__} shards"
            ):
                optimizer.step()
        wrapped.unwrap()
        before.step()

    minidist.run(program, 2)


@EACH
def test_another_models_state_is_refused_by_name(stage: type[ZeRO1]) -> None:
    def program(comm: Communicator) -> None:
        def trained(width: int) -> torch.optim.Optimizer:
            model = stage(nn.Linear(width, 2), comm, op="sum")
            optimizer = model.optimizer(torch.optim.AdamW)
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
            return optimizer

        saved = trained(3).state_dict()
        with pytest.raises(
            ValueError, match=r"exp_avg of parameter 0 is \[2, 3\] there, weight \[2, 5\] here"
        ):
            trained(5).load_state_dict(saved)

    minidist.run(program, 2)


def test_plain_ddp_fails_these_tests() -> None:
    def program(comm: Communicator) -> int:
        model = DDP(build(CONFIG, 0), comm, op="sum")
        optimizer = torch.optim.AdamW(model.parameters_to_reduce)
        step(model, comm.rank)
        optimizer.step()
        return sum(
            t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim()
        )

    assert sum(minidist.run(program, 2)) == 2 * sum(
        2 * p.nbytes for p in build(CONFIG, 0).parameters() if p.requires_grad
    )


def test_what_ddp_takes_in_order_its_stages_take_too() -> None:
    """So one replaces the other in a line of code."""

    def program(comm: Communicator, kind: type[DDP | ZeRO1]) -> tuple[str, bool, list[int]]:
        wrapped = kind(
            nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), comm, "mean", True, 24, 8
        )
        return (
            wrapped.op,
            wrapped.expected.unused,
            [len(bucket.parameters) for bucket in wrapped.reducer.buckets],
        )

    of_ddp, *others = [
        minidist.run(partial(program, kind=kind), 2)[0] for kind in (DDP, ZeRO1, ZeRO2)
    ]
    assert others == [of_ddp] * 2 and of_ddp == ("mean", True, [1, 2, 2, 1])


class Exchanging(torch.optim.SGD):
    """An optimizer that keeps other weights for evaluation, as schedule-free ones do."""

    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.lerp_(torch.ones_like(parameter), 0.5)


def fill(optimizer: Exchanging) -> None:
    with torch.no_grad():
        torch._foreach_mul_([*optimizer.param_groups[0]["params"]], -3.0)


BF16 = MixedPrecision(parameters=torch.bfloat16)


@pytest.mark.parametrize(
    "wrapped",
    (
        ZeRO1,
        partial(ZeRO1, overlap=True),
        ZeRO2,
        FSDP,
        lambda m, *a: FSDP(m, *a, precision=BF16, replicated=[m[1].weight]),
    ),
)
@pytest.mark.parametrize("change", (Exchanging.eval, fill))
def test_slices_that_change_outside_of_a_step_are_there_in_the_next_forward(
    wrapped: Any, change: Any
) -> None:
    def net() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        for parameter in model.parameters():
            parameter.detach().flatten().copy_(torch.arange(parameter.numel()) / 8)
        return model

    def outputs(model: nn.Module, optimizer: Exchanging, ranks: int) -> Tensor:
        found = []
        for _ in range(2):
            (model(torch.ones(1, 3)).sum() / ranks).backward()
            optimizer.step()
            change(optimizer)
            found.append(model(torch.ones(1, 3)).detach().float())
            optimizer.zero_grad()
        return torch.cat(found)

    def program(comm: Communicator) -> Tensor:
        model = wrapped(net(), comm, "sum")
        optimizer = model.optimizer(Exchanging, lr=0.1, elementwise=True)
        found = outputs(model, optimizer, comm.size)
        model.unwrap()  # which waits for what the last forward has begun
        return found

    serial = net()
    expected = outputs(serial, Exchanging(serial.parameters(), lr=0.1), 1)
    for found in minidist.run(program, 3):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@EACH
def test_slices_that_only_some_ranks_change_and_other_memory_are_refused(stage: Any) -> None:
    def program(comm: Communicator) -> None:
        model = stage(nn.Linear(4, 2), comm, "sum")
        with pytest.raises(ValueError, match=r"this slice of bias memory that nobody publishes"):
            model.slices[1].data = torch.ones(1)
        model.slices[0].data.fill_(7)
        with pytest.raises(RuntimeError, match=r"save a mixture: call stepped\(\) on all ranks"):
            model.module.state_dict()
        assert model.unwrap()(torch.ones(4)).shape == (2,)
        assert model.module.weight.eq(7).all()
        again = stage(model.module, comm, "sum")
        if comm.rank:
            again.slices[0].data.fill_(7)
        again(torch.ones(4)).sum().backward()

    with pytest.raises(
        minidist.DeadlockError, match="rank 1 waits: all ranks to come to all_gather_object"
    ):
        minidist.run(program, 2)
