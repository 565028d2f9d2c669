"""torch's `ZeroRedundancyOptimizer` and its checkpoints, on simulated ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import minidist
from minidist.full.comm import CommunicationError, Communicator

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}, 1),  # numbers for each parameter
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}, 2),
}


@pytest.mark.parametrize("name", KINDS)
def test_zero_redundancy_optimizer_holds_each_state_once(name: str) -> None:
    kind, options, held = KINDS[name]

    def program(comm: Communicator) -> tuple[list[Tensor], list[int], int]:
        dist.init_process_group("minidist")
        net, meter = DistributedDataParallel(started_different(comm.rank)), Meter(comm)
        optimizer = ZeroRedundancyOptimizer(net.parameters(), kind, **options)
        train(net, optimizer, meter, partial(loss_of, part=rows_of(comm.rank, comm.size)))
        states = [value for state in optimizer.optim.state.values() for value in state.values()]
        numbers = sum(value.numel() for value in states if value.dim())
        return whole(net.parameters()), meter.steps, numbers

    results = on_ranks(program)
    for found, _, _ in results:
        assert_same(found, serial(name))
    assert sum(numbers for _, _, numbers in results) == held * numbers()
    assert max(numbers for _, _, numbers in results) < held * numbers()
    # an all-reduce, and each parameter from the rank that updates it to all others
    for step in (0, 2):
        sent = sum(steps[step] for _, steps, _ in results)
        assert sent == (2 + 1) * (RANKS - 1) * BYTES * numbers()


def sharded(comm: Communicator) -> tuple[nn.Module, slice]:
    mesh, net = dist.init_device_mesh("cpu", (comm.size,)), started_different(comm.rank)
    return fully_shard(net, mesh=mesh), rows_of(comm.rank, comm.size)


def tensor_parallel(comm: Communicator) -> tuple[nn.Module, slice]:
    mesh = dist.init_device_mesh("cpu", (comm.size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(started_different(comm.rank), mesh, plan), slice(None)


def states_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, state = get_state_dict(net, optimizer)
    return {"model": parameters, "optimizer": state}


def saves(comm: Communicator, folder: Path) -> int:
    dist.init_process_group("minidist")
    net = fully_shard(model(), mesh=dist.init_device_mesh("cpu", (comm.size,)))
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    train(net, optimizer, loss=partial(loss_of, part=rows_of(comm.rank, comm.size)))
    meter = Meter(comm)
    checkpoint.save(states_of(net, optimizer), checkpoint_id=folder)
    meter()
    return meter.steps[0]


def goes_on(comm: Communicator, folder: Path, build: Any) -> list[Tensor]:
    """Load what other ranks saved, and train again."""
    dist.init_process_group("minidist")
    net, part = build(comm)
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    states = states_of(net, optimizer)
    checkpoint.load(states, checkpoint_id=folder)
    set_state_dict(
        net,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    train(net, optimizer, loss=partial(loss_of, part=part))
    return whole(net.parameters())


def test_a_checkpoint_of_torch_goes_on_with_other_ranks_and_another_strategy(
    tmp_path: Path,
) -> None:
    sent = on_ranks(partial(saves, folder=tmp_path))
    assert 0 < sum(sent) < numbers() * BYTES  # who writes what is said; the numbers are not sent
    net = model()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    train(net, optimizer)
    alone = model()
    states = {"model": alone.state_dict()}
    checkpoint.load(states, checkpoint_id=tmp_path)  # this process, which is no rank
    assert_same(whole(alone.parameters()), whole(net.parameters()))
    train(net, optimizer)
    for build, ranks in ((sharded, 2), (tensor_parallel, 4)):
        for found in on_ranks(partial(goes_on, folder=tmp_path, build=build), ranks):
            assert_same(found, whole(net.parameters()))


def saves_beside(comm: Communicator, folder: Path) -> Tensor:
    """Save on a thread that torch begins, while the rank's own goes on."""
    dist.init_process_group("minidist")
    mesh = dist.init_device_mesh("cpu", (comm.size,))
    rows = distribute_tensor(torch.arange(30.0).view(10, 3), mesh, [Shard(0)])
    saving = checkpoint.async_save(
        {"rows": rows}, checkpoint_id=folder, process_group=dist.new_group()
    )
    dist.all_reduce(torch.ones(1))
    saving.result()  # type: ignore[union-attr]
    dist.barrier()
    loaded = {"rows": torch.zeros(10, 3)}
    checkpoint.load(loaded, checkpoint_id=folder)
    return loaded["rows"]


def test_a_thread_that_a_rank_begins_is_the_rank_too(tmp_path: Path) -> None:
    for found in minidist.run(partial(saves_beside, folder=tmp_path / "a"), 2, torch=True):
        assert torch.equal(found, torch.arange(30.0).view(10, 3))
    program = partial(saves_beside, folder=tmp_path / "b")
    with pytest.raises(CommunicationError, match=r"a thread of your own: .* take engine='threads'"):
        minidist.run(program, 2, torch=True, engine="cooperative")
