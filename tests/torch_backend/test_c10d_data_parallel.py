"""torch's DDP with hooks, `no_sync` and `join`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from c10d_training import (
    BYTES,
    OPTIMIZERS,
    RANKS,
    Meter,
    assert_same,
    loss_of,
    model,
    numbers,
    on_ranks,
    rows_of,
    serial,
    started_different,
    train,
    whole,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from minidist.full.comm import Communicator

ALL_REDUCE = 2 * (RANKS - 1) * numbers() * BYTES // RANKS  # what a rank sends in a ring
NVLINK = 450e9  # bytes a second between the ranks of `on_ranks`


def replicated(rank: int) -> DistributedDataParallel:
    dist.init_process_group("minidist")
    return DistributedDataParallel(started_different(rank))  # which sends rank 0's


def power_sgd() -> tuple[object, Any]:
    """Of full rank, which loses nothing."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=256, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    return state, powerSGD_hook.powerSGD_hook


HOOKS: dict[str, tuple[Callable[[], tuple[object, Any]], float]] = {
    "all-reduce": (lambda: (None, default_hooks.allreduce_hook), 1e-12),
    "float16": (lambda: (None, default_hooks.fp16_compress_hook), 2e-2),
    "PowerSGD": (power_sgd, 1e-10),
}


def compressed(hook: str) -> int:
    """Return the elements that the ranks reduce in the third step, in float64's."""
    if hook == "PowerSGD":  # a matrix of n x m as n x r and r x m; r: the smaller of n and m
        shapes = [(p.shape[0], p.numel() // p.shape[0]) for p in model().parameters()]
        return sum((n + m) * min(n, m) for n, m in shapes)
    return numbers() // 4 if hook == "float16" else numbers()


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_ddp_run_and_send_what_they_compress_to(hook: str) -> None:
    make, most = HOOKS[hook]

    def program(comm: Communicator) -> tuple[list[Tensor], list[int]]:
        net = replicated(comm.rank)
        net.register_comm_hook(*make())
        meter = Meter(comm)
        loss = partial(loss_of, part=rows_of(comm.rank, comm.size))
        train(net, OPTIMIZERS["adamw"](net.parameters()), meter, loss)
        return whole(net.parameters()), meter.steps

    results = on_ranks(program)
    for found, _ in results:
        assert_same(found, serial("adamw"), most)
    sent = [sum(steps) for steps in zip(*(steps for _, steps in results), strict=True)]
    assert sent[2] == 2 * (RANKS - 1) * BYTES * compressed(hook)
    if hook == "PowerSGD":  # its first steps are plain
        assert sent[0] == 2 * (RANKS - 1) * BYTES * numbers()


def test_the_first_backward_pass_of_a_static_graph_waits_for_what_it_sends() -> None:
    """It sends when all is computed, and then waits in C++, where no rank hands over."""

    def program(comm: Communicator) -> tuple[list[Tensor | None], float]:
        dist.init_process_group("minidist")
        net = DistributedDataParallel(started_different(comm.rank), static_graph=True)
        comm.barrier()
        began = comm.clock()
        loss_of(net, 0, rows_of(comm.rank, comm.size)).backward()
        return [parameter.grad for parameter in net.parameters()], comm.clock() - began

    net = model()
    loss_of(net, 0).backward()
    expected = [parameter.grad for parameter in net.parameters()]
    for found, seconds in on_ranks(program, engine="cooperative", limit=10):
        assert_same(found, expected)
        assert seconds >= ALL_REDUCE / NVLINK


def test_no_sync_sends_once_what_two_backward_passes_give() -> None:
    def program(comm: Communicator) -> tuple[list[Tensor], list[int]]:
        net, meter, part = replicated(comm.rank), Meter(comm), rows_of(comm.rank, comm.size)
        middle = (part.start + part.stop) // 2

        def halves(net: nn.Module, step: int) -> Tensor:
            assert isinstance(net, DistributedDataParallel)
            with net.no_sync():
                (loss_of(net, step, slice(part.start, middle)) / 2).backward()
            return loss_of(net, step, slice(middle, part.stop)) / 2

        train(net, OPTIMIZERS["adamw"](net.parameters()), meter, halves)
        return whole(net.parameters()), meter.steps

    for found, sent in on_ranks(program):
        assert_same(found, serial("adamw"))
        assert sent[::2] == [ALL_REDUCE] * 2


@pytest.mark.parametrize("hook", ["all-reduce", "PowerSGD"])
def test_join_lets_ranks_run_out_of_batches(hook: str) -> None:
    """Rank r has r + 1 batches of a row each; who has none left gives zeros, and all divide by P."""

    def program(comm: Communicator) -> tuple[list[Tensor], list[int]]:
        net = replicated(comm.rank)
        net.register_comm_hook(*HOOKS[hook][0]())
        optimizer, meter = OPTIMIZERS["sgd"](net.parameters()), Meter(comm)
        with net.join():
            for step in range(comm.rank + 1):
                optimizer.zero_grad()
                loss_of(net, step, slice(comm.rank, comm.rank + 1)).backward()
                optimizer.step()
        meter()
        return whole(net.parameters()), meter.steps

    net = model()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    for step in range(RANKS):
        optimizer.zero_grad()
        for rank in range(step, RANKS):
            (loss_of(net, step, slice(rank, rank + 1)) / RANKS).backward()
        optimizer.step()
    results = on_ranks(program)
    for found, _ in results:
        assert_same(found, whole(net.parameters()), HOOKS[hook][1])
    reduced = 2 * (RANKS - 1) * BYTES * (2 * numbers() + 2 * compressed(hook))
    # in the end, the last to join sends everyone its parameters
    sent = sum(steps[0] for _, steps in results) - (RANKS - 1) * BYTES * numbers()
    assert 0 < sent - reduced < 5000  # who has joined? asked before each step
