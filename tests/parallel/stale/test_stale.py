"""Weights of different age: each way is what the page says, and holds and costs what it says."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist
from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.ddp.sampler import share
from minidist.full.memory.account import Account
from minidist.full.pipeline import Plan, ScheduleError, read_plan, simulate
from minidist.full.pipeline.check import check
from minidist.further.stale.pipeline import StalePipeline
from minidist.further.stale.plans import (
    Versions,
    check_versions,
    flushed,
    most_versions,
    never_flushed,
    newest,
    of_first_stage,
    one_behind,
)
from minidist.further.stale.server import serve, work
from minidist.slow_wires import train_delayed

WIDTH, LR, ROWS = 5, 0.1, 2
NEVER: Mapping[int, float] = MappingProxyType({})


def stages_of(count: int) -> list[nn.Module]:
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


MODELS = {count: stages_of(count) for count in (1, 2, 3, 4)}


def data(count: int) -> tuple[list[Tensor], list[Tensor]]:
    draws = torch.Generator().manual_seed(1)
    rows = [torch.randn(2, ROWS, WIDTH, generator=draws, dtype=torch.float64) for _ in range(count)]
    return [x for x, _ in rows], [y for _, y in rows]


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def run_plan(plan: Plan, versions: Versions, kind: Any = torch.optim.SGD) -> list[Any]:
    """Train by a plan, on as many ranks as stages; return each rank's parameters, losses, and the
    most bytes of weights that it held.
    """
    inputs, targets = data(plan.microbatches)

    def program(comm: Communicator) -> tuple[list[Tensor], float, int]:
        stage = copy.deepcopy(MODELS[plan.ranks][comm.rank])
        optimizer = kind(stage.parameters(), lr=LR)
        pipeline = StalePipeline(
            {comm.rank: stage},
            comm,
            plan,
            versions,
            squared,
            lambda x: torch.empty_like(x),
            {comm.rank: optimizer},
        )
        account = Account()
        account.watch(stage, pipeline)
        most = 0
        update = pipeline.update

        def watched(action: Any) -> None:
            nonlocal most
            update(action)
            most = max(most, account.sample()["parameters"])

        pipeline.update = watched  # type: ignore[method-assign]
        total = pipeline.step(inputs, targets)
        return [each.detach() for each in stage.parameters()], float(total), most

    return minidist.run(program, plan.ranks)


def delayed(
    plan: Plan, delays: list[int], kind: Any = torch.optim.SGD
) -> tuple[list[Tensor], float]:
    """Return parameters and the sum of the losses of the same run on one rank."""
    inputs, targets = data(plan.microbatches)
    parts = copy.deepcopy(MODELS[plan.ranks])
    firsts = range(0, plan.microbatches, plan.batch)
    batches = [range(first, first + plan.batch) for first in firsts]

    def loss_of(batch: range) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number in batch:
            x = inputs[number]
            for part in parts:
                x = part(x)
            total = total + squared(x, targets[number])
        return total

    optimizers = [kind(part.parameters(), lr=LR) for part in parts]
    losses = train_delayed(parts, delays, batches, loss_of, optimizers)
    return [each.detach() for part in parts for each in part.parameters()], sum(losses)


def assert_same(ours: list[Any], theirs: tuple[list[Tensor], float]) -> None:
    parameters = [each for rank in ours for each in rank[0]]
    for a, b in zip(parameters, theirs[0], strict=True):
        assert float((a - b).abs().max()) <= 1e-12 * float(b.abs().max())
    assert ours[-1][1] == pytest.approx(theirs[1], rel=1e-12)


# ---------------------------------------------------------------- pipelines


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_pipedream_is_sgd_with_the_delay_of_each_stage(ranks: int, kind: Any) -> None:
    """x(t + 1) = x(t) - lr g(x(t - d + 1)), d = p - s. Fails if a backward used newer weights."""
    plan = never_flushed(ranks, 9)
    ours = run_plan(plan, newest(plan), kind)
    assert_same(ours, delayed(plan, [ranks - stage for stage in range(ranks)], kind))
    if ranks > 1:
        stale = [each for rank in ours for each in rank[0]]
        fresh, _ = delayed(plan, [1] * ranks, kind)
        assert any(float((a - b).abs().max()) > 1e-4 for a, b in zip(stale, fresh, strict=True))


def test_with_vertical_sync_all_stages_have_the_delay_of_the_first() -> None:
    plan = never_flushed(3, 9)
    assert_same(run_plan(plan, of_first_stage(plan)), delayed(plan, [3, 3, 3]))


@pytest.mark.parametrize(("ranks", "batch"), [(3, 3), (3, 5), (4, 4), (2, 2)])
def test_two_buffers_are_one_update_behind(ranks: int, batch: int) -> None:
    plan = never_flushed(ranks, 4, batch)
    assert_same(run_plan(plan, one_behind(plan)), delayed(plan, [2] * ranks))


def test_with_a_flush_nothing_is_stale() -> None:
    plan = flushed(3, 4, 4)
    assert_same(run_plan(plan, newest(plan)), delayed(plan, [1, 1, 1]))


def test_versions_are_as_many_as_the_table_says() -> None:
    """In the plan, and as bytes that a stage really holds."""
    bytes = sum(each.nbytes for each in MODELS[4][0].parameters())
    plan = never_flushed(4, 12)
    two = never_flushed(4, 4, 4)
    one = flushed(4, 3, 4)
    for planned, versions, expected in (
        (plan, newest(plan), [4, 3, 2, 1]),
        (plan, of_first_stage(plan), [4, 4, 4, 4]),
        (two, one_behind(two), [2, 2, 2, 2]),
        (one, newest(one), [1, 1, 1, 1]),
    ):
        assert list(most_versions(planned, versions)) == expected
        held = [most for _, _, most in run_plan(planned, versions)]
        assert held == [count * bytes for count in expected]


def test_who_never_flushes_has_no_bubble_between_batches() -> None:
    p, m, batches = 4, 8, 6
    without, with_flush = never_flushed(p, batches, m), flushed(p, batches, m)
    each = 3.0 * m  # F takes 1 and B takes 2
    assert simulate(without).length == batches * each + 3.0 * (p - 1)
    assert simulate(with_flush).length == batches * (each + 3.0 * (p - 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0 0B0 0F1 0U0 0B1 0U1", None),  # an update may wait
        ("0F0 0B0 0U0 0F1 0B1", "stage 0 is updated with 1 of 2 microbatches"),
        ("0F0 0B0 0F1 0B1 0U0 0U1", "0U0 stands behind 2 backwards of stage 0"),
    ],
)
def test_a_batch_updates_with_its_own_gradients(text: str, words: str | None) -> None:
    from dataclasses import replace

    plan = replace(read_plan(text), batch=1)
    if words is None:
        check(plan)
        return
    with pytest.raises(ScheduleError, match=words):
        check(plan)


def test_a_version_has_to_be_there() -> None:
    plan = never_flushed(4, 4, 2)
    with pytest.raises(ScheduleError, match="make a batch of at least 4 microbatches"):
        one_behind(plan)
    mixed = tuple((0, 1, 1, 1) for _ in range(1))
    with pytest.raises(ScheduleError, match="only 0 come before it"):
        check_versions(never_flushed(1, 2, 2), mixed)
    with pytest.raises(ScheduleError, match="one update needs one version"):
        check_versions(never_flushed(1, 2, 2), ((0, 0, 1, 0),))
    with pytest.raises(ValueError, match="batches=0, but a plan needs at least 1"):
        never_flushed(2, 0)


# ---------------------------------------------------------------- the server


def served(
    stale: int, steps: int, workers: int = 3, cluster: Any = None, slow: Mapping[int, float] = NEVER
) -> list[tuple[list[Tensor], float, int]]:
    """Train with a server; return each rank's parameters, its clock, and the bytes it sent.

    Worker 1 stands still for some seconds before the steps that `slow` names.
    """
    inputs, targets = data(steps)

    def program(comm: Communicator) -> tuple[list[Tensor], float, int]:
        model = copy.deepcopy(MODELS[1][0])
        parameters = list(model.parameters())
        if comm.rank == 0:
            serve(parameters, torch.optim.AdamW(parameters, lr=LR), comm, steps)
        else:
            with torch.no_grad():
                parameters[0].zero_()  # a worker begins with what the server has

            def loss_of(step: int) -> Tensor:
                comm.advance(1.0 + slow.get(step, 0.0) * (comm.rank == 1))
                rows = share(ROWS, workers, comm.rank - 1)
                return squared(model(inputs[step][rows]), targets[step][rows])

            work(parameters, comm, range(steps), loss_of, stale)
        return [each.detach() for each in parameters], comm.clock(), comm.traffic.bytes

    return minidist.run(program, 1 + workers, cluster=cluster)


@pytest.mark.parametrize("stale", [0, 1, 4])
def test_a_stale_server_is_sgd_with_a_delay(stale: int) -> None:
    """With s = 0 it is the serial run; every rank ends with the last version."""
    steps = 8
    part = copy.deepcopy(MODELS[1])
    inputs, targets = data(steps)
    optimizer = torch.optim.AdamW(part[0].parameters(), lr=LR)
    train_delayed(
        part,
        [stale + 1],
        range(steps),
        lambda step: squared(part[0](inputs[step]), targets[step]),
        [optimizer],
    )
    bytes = sum(each.nbytes for each in part[0].parameters())
    for rank, (parameters, _, sent) in enumerate(served(stale, steps)):
        for a, b in zip(parameters, part[0].parameters(), strict=True):
            assert float((a - b).abs().max().detach()) <= 1e-12 * float(b.abs().max().detach())
        assert sent == (3 * (steps + 1) * bytes if rank == 0 else steps * bytes)


def test_what_it_costs_to_wait() -> None:
    """On the virtual clock. Each message takes 0.1 s, so that a synchronous step takes 1.2 s."""
    cluster = minidist.Cluster.uniform(latency=0.1, bandwidth=1e15)
    steps = 6

    def last(stale: int, slow: Mapping[int, float] = NEVER) -> float:
        return max(clock for _, clock, _ in served(stale, steps, 2, cluster, slow))

    there_and_back = 0.2
    first = 0.1  # version 0 comes
    assert last(0) == pytest.approx(first + steps * (1 + there_and_back))
    assert last(1) == pytest.approx(first + steps + there_and_back)
    # one worker stands still once: who may be two steps behind does not notice until the end
    pause = {2: 0.8}
    assert last(0, pause) == pytest.approx(last(0) + 0.8)
    slower = dict.fromkeys(range(steps), 0.5)
    assert last(0, slower) == pytest.approx(last(0) + steps * 0.5)
    assert last(4, slower) == pytest.approx(first + steps * 1.5 + there_and_back)


def test_a_pause_of_one_delays_the_others_only_if_they_wait() -> None:
    """Two workers stand still in turn: in step they pay for both, two steps apart for one."""
    cluster = minidist.Cluster.uniform(latency=0.0, bandwidth=1e15)

    def program(comm: Communicator, stale: int) -> float:
        parameters = [nn.Parameter(torch.zeros(3))]
        if comm.rank == 0:
            serve(parameters, torch.optim.SGD(parameters, lr=LR), comm, 8)
        else:

            def loss_of(step: int) -> Tensor:
                comm.advance(1.0 + 2.0 * (step == 1 + 3 * (comm.rank - 1)))
                return parameters[0].sum()

            work(parameters, comm, range(8), loss_of, stale)
        return comm.clock()

    def last(stale: int) -> float:
        return float(max(minidist.run(lambda comm: program(comm, stale), 3, cluster=cluster)))

    assert last(0) == pytest.approx(8 + 2 * 2.0)
    assert last(3) == pytest.approx(8 + 2.0)


def test_bulk_synchronous_is_data_parallelism() -> None:
    steps, workers = 5, 2
    inputs, targets = data(steps)

    def program(comm: Communicator) -> list[Tensor]:
        model = copy.deepcopy(MODELS[1][0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        for step in range(steps):
            rows = share(ROWS, comm.size, comm.rank)
            squared(model(inputs[step][rows]), targets[step][rows]).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                all_reduce(parameter.grad, comm)
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach() for each in model.parameters()]

    ours = served(0, steps, workers)[0][0]
    for a, b in zip(ours, minidist.run(program, workers)[0], strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_staleness_is_not_negative() -> None:
    with pytest.raises(ValueError, match="stale=-1: a worker uses weights that are 0 or more"):
        minidist.run(lambda comm: work([], comm, [], lambda _: torch.zeros(()), -1), 1)
