"""ZeRO 3: the serial numbers from a part of everything; whole units come and go, and each byte is
counted.
"""

from __future__ import annotations

from collections.abc import Callable
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
from torch import Tensor, nn

import minidist
from minidist.full import DDP, FSDP, clip_by_global_norm
from minidist.full.comm import Communicator
from minidist.full.fsdp.window import MOST
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full.recompute.segments import recompute

DEEP = GPTConfig(**(vars(CONFIG) | {"layers": 5, "tied": False}))


def everything(module: nn.Module) -> bool:
    """Wrap whatever has parameters of its own: nothing is left for the root."""
    return any(True for _ in module.parameters(recurse=False))


def step(model: nn.Module, rank: int, rows: int = 2) -> Tensor:
    """Run one forward and backward."""
    tokens = torch.randint(19, (rows, 9), generator=torch.Generator().manual_seed(rank))
    loss = cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("ranks", (1, 2, 3, pytest.param(4, marks=pytest.mark.soak), 5))
@pytest.mark.parametrize("config", (CONFIG, DROPPING), ids=("plain", "dropout"))
@pytest.mark.parametrize("reshard", (True, False))
def test_parity_with_the_serial_run(ranks: int, config: GPTConfig, reshard: bool) -> None:
    def program(comm: Communicator) -> dict[str, Tensor]:
        return parallel(comm, Case(FSDP, config), reshard_after_forward=reshard)

    check_parity(minidist.run(program, ranks), config)


@pytest.mark.parametrize("zero", ZEROS, ids=lambda zero: zero.__name__)
@pytest.mark.parametrize("microbatches", (1, pytest.param(2, marks=pytest.mark.soak), 3))
def test_parity_whoever_zeroes_and_however_many_microbatches(zero: Zero, microbatches: int) -> None:
    case = Case(FSDP, microbatches=microbatches, zero=zero)
    check_parity(minidist.run(lambda comm: parallel(comm, case), 3), CONFIG)


@pytest.mark.parametrize("ranks, group", ((2, 1), (2, 2), (4, 2), (6, 3), (6, 2)))
def test_parity_of_hybrid_sharding(ranks: int, group: int) -> None:
    check_parity(
        minidist.run(lambda comm: parallel(comm, Case(FSDP), shard_ranks=group), ranks), CONFIG
    )


@pytest.mark.parametrize("policy", ("full", "every 2", "sqrt", "selective"))
def test_parity_with_recomputation(policy: str) -> None:
    def program(comm: Communicator) -> tuple[dict[str, Tensor], int]:
        model = build(DROPPING, comm.rank)
        wrapped = FSDP(model, comm, op="sum")
        recompute(model, policy)
        most = watch(wrapped)
        train(wrapped, Case(FSDP, DROPPING), comm.size, comm.rank)
        whole = dict(wrapped.full_tensors())
        return {name: whole[name] for name, _ in model.named_parameters()}, max(most)

    states, most = zip(*minidist.run(program, 2), strict=True)
    check_parity(states, DROPPING)
    assert max(most) <= MOST


def whole_units(model: FSDP) -> list[str]:
    """Return the names of the units, the root aside, whose parameters have memory now."""
    units = [unit for unit in model.units if unit is not model.root]
    return [
        unit.name
        for unit in units
        if any(flat.unsharded.untyped_storage().nbytes() for flat in unit.flats)
    ]


def watch(model: FSDP) -> list[int]:
    """Note from now on how many units are whole whenever a module begins or a gradient comes."""
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(len(whole_units(model)))

    for module in model.module.modules():
        module.register_forward_pre_hook(look)
    for parameter in model.parameters_to_reduce:
        parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    return seen


@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_two_units_are_whole_at_most_and_none_after_backward(ranks: int) -> None:
    def program(comm: Communicator) -> tuple[list[int], int, int, int]:
        model = wrap(build(DEEP, comm.rank), comm, Case(FSDP))
        assert isinstance(model, FSDP)
        seen = watch(model)
        for _ in range(2):  # from the second forward on, units are gathered ahead
            step(model, comm.rank)
        held = sum(
            flat.mine.nbytes + flat.unsharded.untyped_storage().nbytes() for flat in model.flats
        )
        return seen, held, sum(p.nbytes for p in model.parameters()), len(model.flats)

    for seen, held, total, flats in minidist.run(program, ranks):
        assert max(seen) == MOST
        assert held <= total / ranks + 8 * flats


def test_the_next_unit_is_gathered_while_one_is_used() -> None:
    def program(comm: Communicator) -> list[list[str]]:
        model = FSDP(build(DEEP, 0), comm, op="sum")
        step(model, comm.rank)
        seen: list[list[str]] = []
        for unit in model.units[1:4]:
            mlp: Any = unit.module.mlp
            mlp.register_forward_pre_hook(lambda *_: seen.append(whole_units(model)))
            norm: Any = unit.module.attention_norm  # the last to get its gradient
            norm.weight.register_post_accumulate_grad_hook(
                lambda _: seen.append(whole_units(model))
            )
        step(model, comm.rank)
        return seen

    forward = [["layers.1", "layers.2"], ["layers.2", "layers.3"], ["layers.3", "layers.4"]]
    backward = [["layers.2", "layers.3"], ["layers.1", "layers.2"], ["layers.0", "layers.1"]]
    for seen in minidist.run(program, 2):
        assert seen[:3] == forward
        assert seen[3:] == backward


@pytest.mark.parametrize("ahead", (False, True), ids=("on a CPU", "on a GPU"))
def test_in_backward_a_gpu_gathers_the_previous_unit_at_once(ahead: bool) -> None:
    """When gradients arrive, a GPU has been told to compute them, but has not: a gather would wait
    for them.
    """

    def program(comm: Communicator) -> list[list[str]]:
        model = FSDP(build(DEEP, 0), comm, op="sum")
        assert not model.passes.ahead_of_time
        model.passes.ahead_of_time = ahead
        step(model, comm.rank)
        seen: list[list[str]] = []
        for unit in model.units[1:4]:
            first: Any = unit.module.mlp.down  # to get its gradient
            first.weight.register_post_accumulate_grad_hook(
                lambda _: seen.append(whole_units(model))
            )
        step(model, comm.rank)
        return seen

    alone = [["layers.3"], ["layers.2"], ["layers.1"]]
    both = [["layers.2", "layers.3"], ["layers.1", "layers.2"], ["layers.0", "layers.1"]]
    for seen in minidist.run(program, 2):
        assert seen == (both if ahead else alone)


@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize(
    "options, volume",
    (
        ({"policy": everything}, lambda units, root: 3 * units),
        ({}, lambda units, root: 3 * units + 2 * root),
        ({"reshard_after_forward": False}, lambda units, root: 2 * (units + root)),
    ),
    ids=("all wrapped", "blocks wrapped", "not resharded"),
)
def test_bytes_sent(ranks: int, options: dict[str, Any], volume: Callable[[int, int], int]) -> None:
    def program(comm: Communicator) -> tuple[int, int, int]:
        model = build(DEEP, comm.rank).requires_grad_(True)
        wrapped = FSDP(model, comm, op="sum", **options)
        step(wrapped, comm.rank)
        before = comm.traffic.bytes
        step(wrapped, comm.rank)
        units, root = (
            sum(parameter.nbytes for flat in flats for parameter in flat.parameters)
            for flats in (
                [f for unit in wrapped.units[:-1] for f in unit.flats],
                wrapped.root.flats,
            )
        )
        return comm.traffic.bytes - before, units, root

    sent, units, root = zip(*minidist.run(program, ranks), strict=True)
    assert sum(sent) == (ranks - 1) * volume(units[0], root[0])


def test_hybrid_sharding_sends_a_part_across() -> None:
    def program(comm: Communicator) -> tuple[int, int, int]:
        model = FSDP(build(DEEP, comm.rank).requires_grad_(True), comm, op="sum", shard_ranks=2)
        step(model, comm.rank)
        assert model.ranks.across is not None
        across, inside = (
            model.ranks.across.traffic.bytes,
            model.ranks.shard_comm.traffic.bytes,
        )
        total = sum(p.nbytes for p in model.parameters())
        step(model, comm.rank)
        return (
            model.ranks.across.traffic.bytes - across,
            model.ranks.shard_comm.traffic.bytes - inside,
            total,
        )

    for across, inside, total in minidist.run(program, 4):
        # an all-reduce over two, of half of them
        assert across == pytest.approx(2 * (1 / 2) * total / 2, rel=0.01)
        assert inside <= 3 * (1 / 2) * total * 1.01


def test_state_is_a_part_of_everything_and_any_number_of_ranks_reads_it() -> None:
    def program(comm: Communicator, given: Any = None) -> tuple[Any, dict[str, Tensor], int, int]:
        model = FSDP(build(CONFIG, 0), comm, op="sum")
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
        if given:
            optimizer.load_state_dict(given[0])
            model.load(given[1])
        else:
            step(model, 0)
            optimizer.step()
        held = sum(
            t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim()
        )
        trained = sum(p.nbytes for p in model.parameters_to_reduce)
        return optimizer.state_dict(), model.full_state_dict(), held, trained

    moments, state, held, trained = minidist.run(program, 3)[1]
    assert held <= 2 * trained / 3 + 16 * 8
    for ranks in (1, 2, 5):
        read, same, _, _ = minidist.run(lambda comm: program(comm, (moments, state)), ranks)[-1]
        assert all(torch.equal(same[name], state[name]) for name in state)
        for index, values in moments["state"].items():
            assert torch.equal(values["exp_avg"], read["state"][index]["exp_avg"])
    serial = build(CONFIG, 1)
    serial.load_state_dict(state)
    unsharded = torch.optim.AdamW([p for p in serial.parameters() if p.requires_grad], lr=0.01)
    unsharded.load_state_dict(moments)
    step(serial, 0)
    unsharded.step()


def test_clipping_uses_the_norm_of_all_shards() -> None:
    def program(comm: Communicator) -> tuple[float, float, float]:
        model, reference = (
            FSDP(build(CONFIG, 0), comm, op="sum", shard_ranks=2),
            DDP(build(CONFIG, 0), comm, op="sum"),
        )
        step(model, comm.rank), step(reference, comm.rank)
        norm = float(clip_by_global_norm(model.slices, 0.5))
        expected = float(clip_by_global_norm(reference.parameters(), 0.5))
        return norm, expected, float(clip_by_global_norm(model.slices, 0))

    for norm, expected, after in minidist.run(program, 4):
        assert norm == pytest.approx(expected, rel=1e-12) and after == pytest.approx(0.5, rel=1e-5)


def test_a_model_that_nobody_could_hold_is_built_shard_by_shard() -> None:
    def program(comm: Communicator) -> tuple[dict[str, Tensor], list[int]]:
        model = GPT(CONFIG, dtype=torch.float64, device="meta")
        wrapped = FSDP(model, comm, op="sum", device="cpu")
        drawn: list[int] = []

        def one_by_one() -> Any:
            for name, weight in model.initial_weights(torch.Generator().manual_seed(7)):
                drawn.append(len(whole_units(wrapped)))
                yield name, weight

        wrapped.load(one_by_one())
        step(wrapped, comm.rank)
        return wrapped.full_state_dict(), drawn

    expected = GPT(CONFIG, torch.Generator().manual_seed(7), dtype=torch.float64).state_dict()
    for state, whole in minidist.run(program, 3):
        assert list(state) == list(expected) and max(whole) == 0
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_gradients_that_somebody_still_looks_at_are_not_zeroed_with_the_others() -> None:
    def program(comm: Communicator) -> None:
        model = FSDP(build(CONFIG, comm.rank), comm, op="sum")
        step(model, comm.rank)
        seen = [flat.shard.gradient for flat in model.flats if flat.shard.gradient is not None]
        before = [gradient.clone() for gradient in seen]
        model.zero_grad()
        assert (
            seen
            and all(map(torch.equal, seen, before))
            and all(piece.grad is None for piece in model.slices)
        )

    minidist.run(program, 2)
