"""Simulated ranks are processes to torch: each has its own default group and generator."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

import minidist
from minidist import torch_backend as c10d
from minidist.full.comm import Communicator, DeadlockError, LimitError


def draws(seed: int) -> list[Tensor]:
    """Draw in every way that comes to mind; a process of its own would draw these numbers."""
    torch.manual_seed(seed)
    layer = nn.Linear(3, 3)  # what it is initialised with
    drawn = [layer.weight.detach(), torch.randn(5), torch.rand_like(torch.empty(3))]
    state = torch.get_rng_state()
    drawn += [nn.functional.dropout(torch.ones(64)), torch.randperm(20)]
    torch.set_rng_state(state)
    first, _ = torch.utils.data.random_split(range(10), [4, 6])  # names torch's generator
    drawn += [torch.tensor(list(first))]
    drawn += [torch.multinomial(torch.ones(9), 4), torch.empty(4).exponential_()]
    drawn += [
        torch.tensor(torch.initial_seed()),
        torch.native_dropout(torch.ones(64), 0.5, True)[0],
    ]
    inputs = torch.ones(4, 3, requires_grad=True)
    noisy = checkpoint(lambda x: nn.functional.dropout(layer(x)), inputs, use_reentrant=False)
    noisy.sum().backward()  # draws the same mask again
    assert inputs.grad is not None
    return [*drawn, noisy.detach(), inputs.grad]


def test_each_rank_draws_from_a_default_generator_of_its_own() -> None:
    alone = [draws(seed) for seed in range(4)]
    before = torch.get_rng_state()

    def program(comm: Communicator) -> list[Tensor]:
        for _ in range(20):  # so that threads meet
            found = draws(comm.rank)
        return found

    for one, other in zip(minidist.run(program, 4, torch=True), alone, strict=True):
        assert all(map(torch.equal, one, other))
    assert torch.equal(torch.get_rng_state(), before), "the process's own is as it was"


def test_ranks_begin_as_a_fresh_process_does() -> None:
    fresh = torch.Generator()
    expected = torch.randn(3, generator=fresh)
    for drawn in minidist.run(lambda comm: torch.randn(3), 3, torch=True):
        assert torch.equal(drawn, expected)


def test_nothing_of_the_ranks_stays_behind() -> None:
    world = dist.distributed_c10d._world
    hook, generator = sys.excepthook, torch.random.default_generator

    def program(comm: Communicator) -> bool:
        dist.init_process_group("minidist")  # and leaves it open
        return dist.is_initialized()

    assert minidist.run(program, 3, torch=True) == [True] * 3
    assert not dist.is_initialized()
    assert dist.distributed_c10d._world is world
    assert (sys.excepthook, torch.random.default_generator) == (hook, generator)


def test_a_rank_plans_by_its_own_place_what_a_dtensor_of_uneven_shards_sends() -> None:
    whole = {rows: torch.arange(2.0 * rows).view(rows, 2) for rows in (3, 5, 7, 9)}

    def program(comm: Communicator) -> bool:
        dist.init_process_group("minidist")
        mesh = dist.init_device_mesh("cpu", (2, 2))
        same = []
        for rows in whole.values():
            cut = distribute_tensor(rows, mesh, [Shard(0), Shard(0)])
            for to in ([Replicate(), Shard(0)], [Shard(1), Shard(0)], [Shard(0), Shard(1)]):
                same.append(torch.equal(cut.redistribute(mesh, to).full_tensor(), rows))
        return all(same)

    for _ in range(2):  # the second time, torch has its plans
        assert minidist.run(program, 4, torch=True) == [True] * 4


def test_one_rank_profiles_and_a_second_one_hears_it() -> None:
    """In a process of its own: with a second profiler it would end in a segmentation fault."""
    program = """if True:
        import minidist, torch, torch.distributed as dist

        def program(comm, several):
            dist.init_process_group("minidist")
            dist.barrier()
            if comm.rank and not several:
                return dist.all_reduce(torch.ones(2))
            with torch.profiler.profile() as profile:
                dist.barrier() if several else dist.all_reduce(torch.ones(2))
            return any(event.name == "c10d::allreduce_" for event in profile.events())

        print(minidist.run(lambda comm: program(comm, False), 2, torch=True))
        minidist.run(lambda comm: program(comm, True), 2, torch=True)
        """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("[True, None]\n"), done.stderr
    assert "RuntimeError: torch's profiler, of which a process has one, is in use" in done.stderr


def test_no_dispatch_mode_seems_entered_once_the_ranks_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # as it is where no program of another test has left a mode
    monkeypatch.setattr(torch.utils._python_dispatch, "_is_in_torch_dispatch_mode", False)

    def program(comm: Communicator) -> None:
        comm.barrier()  # all have entered theirs, and leave in another order

    minidist.run(program, 3, torch=True, engine="cooperative", seed=0)
    assert not is_in_torch_dispatch_mode()


def test_what_a_rank_compiles_draws_from_its_generator() -> None:
    def noisy(x: Tensor) -> Tensor:
        return nn.functional.dropout(x) * 2

    def program(comm: Communicator) -> tuple[int, list[Tensor]]:
        graphs = []

        def keeps(graph: Any, inputs: object) -> Any:
            graphs.append(graph)
            return graph

        drawn = []
        for function in (noisy, torch.compile(noisy, backend=keeps, fullgraph=True)):
            torch.manual_seed(comm.rank)
            drawn.append(function(torch.ones(64)))
        return len(graphs), drawn

    for graphs, (eager, compiled) in minidist.run(program, 2, torch=True, engine="cooperative"):
        assert graphs == 1
        assert torch.equal(eager, compiled)


WHAT_ENTERING_IMPORTS = """
import sys, minidist
from torch.autograd.profiler import record_function

def program(comm):
    before = set(sys.modules)
    with record_function("on a rank"):
        pass
    return [name for name in set(sys.modules) - before if name.startswith("torch.profiler")]

print(minidist.run(program, 2, torch=True))
"""


def test_no_rank_is_the_first_to_enter_a_profilers_range_which_imports() -> None:
    """With torch.compile on another rank, both would wait for ever."""
    command = [sys.executable, "-c", WHAT_ENTERING_IMPORTS]
    fresh = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert fresh.stdout == "[[], []]\n", fresh.stderr


def test_a_receive_that_nobody_sends_is_a_proved_deadlock_with_its_line() -> None:
    def program(comm: Communicator) -> None:
        dist.init_process_group("minidist")
        if comm.rank == 0:
            dist.recv(torch.empty(1), 1)
        else:
            dist.all_reduce(torch.empty(1))

    with pytest.raises(DeadlockError, match=r"receive from rank 1 .* at test_c10d_ranks.py:\d+"):
        minidist.run(program, 2, torch=True)


def test_a_communicator_is_left_as_it_was() -> None:
    comm = minidist.init()
    with c10d.on(comm):
        dist.init_process_group("minidist")
        assert comm.debug and dist.get_backend() == "minidist"
        dist.destroy_process_group()
    assert not comm.debug
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        dist.init_process_group("minidist")


@pytest.mark.parametrize("engine", ["threads", "cooperative"])
@pytest.mark.parametrize("where", ["env://", "tcp://127.0.0.1:1", "file:///nowhere/at/all"])
def test_ranks_wait_for_what_another_puts_into_the_store(engine: str, where: str) -> None:
    def program(comm: Communicator) -> tuple[bytes, int]:
        dist.init_process_group("minidist", where, rank=comm.rank, world_size=comm.size)
        store = dist.distributed_c10d._get_default_store()
        if comm.rank == 1:
            store.set("port", "29500")
        port = store.get("port")
        store.add("arrived", 1)
        dist.barrier()
        return port, store.add("arrived", 0)

    assert minidist.run(program, 3, torch=True, engine=engine) == [(b"29500", 3)] * 3


@pytest.mark.parametrize("engine", ["threads", "cooperative"])
def test_a_value_that_nobody_sets_is_a_deadlock_unless_a_timeout_was_asked_for(
    engine: str,
) -> None:
    def program(comm: Communicator) -> None:
        dist.init_process_group("minidist")
        store = dist.distributed_c10d._get_default_store()
        with pytest.raises(dist.DistStoreError):
            store.wait(["never"], timedelta(seconds=0.01))
        store.get("never")

    with pytest.raises(DeadlockError, match="rank 1 waits: the store's 'never' at test_c10d_ranks"):
        minidist.run(program, 2, torch=True, engine=engine)


@pytest.mark.parametrize("engine", ["threads", "cooperative"])
def test_a_limit_ends_a_wait_in_the_store_for_a_rank_that_computes(engine: str) -> None:
    over = threading.Event()

    def program(comm: Communicator) -> None:
        dist.init_process_group("minidist")
        if comm.rank == 0:
            dist.distributed_c10d._get_default_store().get("never")
        else:
            over.wait(20)  # then nobody is left who could set it: a deadlock

    words = r"(?s)limit 0.5 s.*rank 0 waits .* the store's 'never' at test_c10d_ranks"
    with pytest.raises(LimitError, match=words):
        minidist.run(program, 2, torch=True, engine=engine, limit=0.5)
    over.set()
