"""What is dropped is gone: wrapped models, streams and their threads, registered memory, groups of
ranks.
"""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from layouts import Case, one_step, spread
from ranks import clean_environment, mpirun, torchrun
from torch import Tensor, nn

import minidist
from minidist.full import DDP, FSDP, ZeRO1, ZeRO2
from minidist.full.comm import Communicator, DeadlockError
from minidist.full.comm.engine.pool import MANY, Group
from minidist.full.comm.mpi_wire.window import open_window
from minidist.full.launch.jobs import run_job
from minidist.full.launch.mpirun import environment, find_mpirun
from minidist.full.mesh import Layout
from minidist.further import Recipe, ZeROPlusPlus

WRAPPERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "DDP": (DDP, {}),
    "ZeRO1": (ZeRO1, {}),
    "ZeRO1 overlapping": (ZeRO1, {"overlap": True}),
    "ZeRO2": (ZeRO2, {}),
    "FSDP": (FSDP, {}),
    "FSDP hybrid": (FSDP, {"shard_ranks": 2}),
    "ZeRO++": (ZeROPlusPlus, {"node_ranks": 2}),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is dropped goes at once, and does not wait for Python to look for cycles."""
    train(layers())  # on the way torch imports what leaves cycles behind
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 4)), nn.Linear(4, 3)
    )


def train(model: Any) -> Tensor:
    """Take two steps, leave gradients behind, and return the last loss."""
    sharded = hasattr(model, "optimizer")
    optimizer = (
        model.optimizer(torch.optim.AdamW) if sharded else torch.optim.AdamW(model.parameters())
    )
    for _ in range(2):
        model.zero_grad()
        loss: Tensor = model(torch.ones(2, 6)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if hasattr(model, "wait"):
        model.wait()
    return loss


def threads_of(comm: Communicator) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"rank {comm.rank} stream"]


def hooks_on(model: nn.Module) -> int:
    """Return how many hooks there are on a model, its modules and its parameters."""
    on_modules = [
        [m._forward_pre_hooks, m._forward_hooks, m._state_dict_pre_hooks] for m in model.modules()
    ]
    on_modules += [[module._load_state_dict_pre_hooks] for module in model.modules()]
    on_parameters = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    return sum(len(hooks) for several in on_modules for hooks in several) + sum(
        map(len, on_parameters)
    )


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("unwrap", [False, True])
def test_nothing_of_a_dropped_wrapper_stays_and_parameters_do(name: str, unwrap: bool) -> None:
    kind, options = WRAPPERS[name]

    def program(comm: Communicator) -> None:
        serial, before = layers(), set(threading.enumerate())
        model = kind(serial, comm, op="sum", **options)
        loss = train(model)
        if unwrap:
            assert model.unwrap() is serial
            serial[0].weight.data.fill_(comm.rank)
            assert model.unwrap() is serial, "it may be called again"
            assert (serial[0].weight == comm.rank).all(), (
                "and what is done to the model meanwhile counts"
            )
        freed = issubclass(kind, FSDP) and not unwrap
        values = [] if freed else [value.detach().clone() for value in serial.parameters()]
        threads, held = threads_of(comm), weakref.ref(model)
        end = model.passes.end if issubclass(kind, FSDP) else model.reducer.end
        parts = [weakref.ref(part) for part in (model.stream, model.stream.comm, end)]
        del end
        assert threads and not set(threads) & before
        del model
        for thread in threads:
            thread.join(20)
        assert loss.grad_fn is not None
        assert held() is None and not [part for part in parts if part() is not None]
        assert not [thread for thread in threads if thread.is_alive()]
        assert len(comm.ledger.statuses) == 1
        if unwrap or not issubclass(kind, FSDP):
            assert hooks_on(serial) == 0
            assert all(map(torch.equal, serial.parameters(), values))
            serial(torch.ones(2, 6)).sum().backward()
            torch.optim.SGD(serial.parameters(), lr=0.1).step()
        else:
            with pytest.raises(
                RuntimeError, match="shared out by a strategy that is gone: keep what wraps a model"
            ):
                serial(torch.ones(2, 6))
        del serial, loss
        assert not comm.registered.windows

    minidist.run(program, 4)


@pytest.mark.usefixtures("no_collector")
def test_a_graph_keeps_the_wrapper_until_its_backward_has_reduced_the_gradients() -> None:
    def program(comm: Communicator, kind: Any) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        loss = kind(model, comm, op="sum")(torch.full((1, 2), comm.rank + 1.0)).sum()
        assert threads_of(comm)
        loss.backward()
        for thread in threads_of(comm):
            thread.join(20)
        assert not threads_of(comm) and loss.grad_fn is not None
        return [] if model.weight.grad is None else model.weight.grad.flatten().tolist()

    assert minidist.run(partial(program, kind=DDP), 3) == [[6, 6]] * 3
    assert minidist.run(partial(program, kind=FSDP), 3) == [[]] * 3


def test_a_model_whose_wrapper_was_dropped_can_be_wrapped_again() -> None:
    def program(comm: Communicator) -> None:
        model = layers()
        for kind in (DDP, ZeRO1, ZeRO2, DDP):
            wrapped = kind(model, comm, op="sum")
            with pytest.raises(
                ValueError, match=r"belongs to another DDP already.*: call unwrap\(\) on the other"
            ):
                DDP(model, comm, op="sum")
            train(wrapped)
            del wrapped

    minidist.run(program, 2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_nothing_of_a_dropped_model_on_a_mesh_stays(zero: int) -> None:
    schedule = "zb-h1" if zero < 2 else "1f1b"
    case = Case(
        Layout(dp=2, pp=2, tp=2),
        Recipe(zero=zero, microbatches=2, schedule=schedule, sp=True),
    )

    def program(comm: Communicator) -> tuple[list[Any], list[threading.Thread]]:
        parallel = spread(comm, case)
        assert parallel.pipeline is not None
        one_step(parallel, case, 0)
        threads = threads_of(comm)
        mesh = parallel.mesh
        everything = [
            parallel,
            parallel.model,
            parallel.replica,
            parallel.pipeline,
            mesh,
            mesh.tp,
            mesh.dp,
            mesh.pp,
        ]
        found = [weakref.ref(it) for it in [*everything, *parallel.model.parameters()]]
        del parallel, everything, mesh
        comm.barrier()
        gc.collect()
        for thread in threads:
            thread.join(20)
        # gradients know their ranks, and another rank's thread may have held one of this rank's
        comm.barrier()
        gc.collect()
        assert not comm.registered.windows
        return [it() for it in found if it() is not None], threads

    for left, threads in minidist.run(program, 8):
        assert not left
        assert threads and not [thread for thread in threads if thread.is_alive()]


@pytest.mark.usefixtures("no_collector")
def test_a_stream_that_nobody_holds_does_what_was_launched_and_ends_its_thread() -> None:
    def program(comm: Communicator) -> int:
        stream, done = comm.stream(), []
        gate, left = threading.Event(), weakref.ref(stream)
        stream.launch(gate.wait)
        for number in range(5):
            stream.launch(done.append, number)
        threads = threads_of(comm)
        del stream
        assert left() is None and len(threads) == 1, "jobs that wait do not hold it"
        gate.set()
        threads[0].join(20)
        assert not threads[0].is_alive()
        return len(done)

    assert minidist.run(program, 2) == [5, 5]


def test_a_fork_that_nobody_holds_hides_no_deadlock_from_a_thread_that_could_have_used_it() -> None:
    gate = threading.Event()

    def program(comm: Communicator) -> None:
        comm.fork()
        if comm.rank == 0:
            # who knows what this one holds?
            threading.Thread(target=gate.wait, daemon=True).start()
        comm.recv(np.zeros(1), 1 - comm.rank)

    try:
        with pytest.raises(DeadlockError):
            minidist.run(program, 2)
    finally:
        gate.set()


@pytest.mark.usefixtures("no_collector")
def test_registered_memory_lives_as_long_as_the_last_view_of_it() -> None:
    def program(comm: Communicator) -> None:
        memory = comm.allocate(100, torch.float32)
        assert isinstance(memory, Tensor)
        memory.fill_(comm.rank)
        part: Tensor | None = nn.Parameter(memory[10:20].view(2, 5))
        assert part is not None
        del memory
        assert len(comm.registered.windows) == 1
        peers = comm.peers(part.detach().numpy().reshape(-1))
        comm.barrier()
        assert peers is not None and [peer[0] for peer in peers] == list(range(comm.size))
        comm.barrier()
        if comm.rank == 1:  # what one rank drops, the others still see
            part = None
            assert not comm.registered.windows
        comm.barrier()
        assert [peer[0] for peer in peers] == list(range(comm.size))

    minidist.run(program, 3)


# ---- groups of ranks ----


def test_a_group_is_taken_again_once_all_its_ranks_have_forgotten_it() -> None:
    def program(comm: Communicator) -> list[list[object]]:
        made: list[object] = []

        def make() -> object:
            made.append(object())
            return made[-1]

        origin = Group(None)
        halves = [[0, 1], [2, 3]]

        def take(parts: list[list[int]]) -> Group:
            return origin.derive(
                comm, parts, next(part for part in parts if comm.rank in part), make
            )

        first, second = take(halves), take([[0, 1, 2, 3]])
        handles = [first.handle, second.handle]
        if comm.rank != 3:
            del first
        third = take(halves)  # rank 3 still holds the first one
        assert third.handle not in handles and len(made) == 3
        first = None  # type: ignore[assignment]
        fourth = take(halves)
        assert fourth.handle is handles[0] and len(made) == 3
        fifth = take([[0, 1, 2, 3]])
        assert len(made) == 4, "the second is in use"
        del second, fourth, fifth
        assert take([[1, 0], [2, 3]]).handle not in handles, "its ranks stand in another order"
        assert take([[0, 1, 2, 3]]).handle is handles[1], "the one that was made first"
        return [made]

    minidist.run(program, 4)


@pytest.mark.usefixtures("no_collector")
def test_groups_in_cycles_are_found_before_there_are_many() -> None:
    def program(comm: Communicator) -> int:
        origin = Group(None)
        for _ in range(5 * MANY):
            cycle: list[object] = [origin.derive(comm, [[0, 1]], [0, 1], object)]
            cycle.append(cycle)
        return len(origin.pool.made)

    assert max(minidist.run(program, 2)) <= 2 * MANY


SUBGROUPS = """
    import numpy as np
    import minidist
    import minidist.full.collectives as collectives

    comm = minidist.init(limit=60)
    ranks = [2, 0]
    if comm.rank in ranks:
        pool = comm.wire.group.pool
        kept = comm.subgroup(ranks, "kept")
        for number in range(50):
            group = comm.subgroup(ranks, f"number {number}")
            assert group.wire.mpi.handle != kept.wire.mpi.handle and group.members == (2, 0)
            total = np.full(3, group.rank + number)
            collectives.all_reduce(total, group, algorithm="ring")
            assert (total == 1 + 2 * number).all()
        made = len(pool.among[2, 0].pool.made)  # one is kept, one is held while the next is made
        assert made == 3 and list(pool.among) == [(2, 0)], (made, pool.among)
        assert comm.subgroup([0, 2], "in another order").members == (0, 2)
        print("made 52")
"""


def test_a_subgroup_is_taken_again_over_mpi_without_asking_the_other_ranks() -> None:
    outcome = mpirun(3, SUBGROUPS, timeout=60)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count("made 52") == 2


WRAPS = """
    import os, sys, threading
    import torch
    from torch import nn
    import minidist
    from minidist.full import DDP, FSDP, ZeRO1, ZeRO2

    comm = minidist.init(limit=60)
    times, kinds = int(sys.argv[1]), [(DDP, {}), (ZeRO1, {}), (ZeRO2, {}), (FSDP, {}), (FSDP, {"shard_ranks": 1})]

    def groups(pool):
        return sum(1 + groups(inner) for _, _, inner in pool.made.values())

    def resources():
        maps = open("/proc/self/maps").read()
        return {
            "windows": maps.count("memfd:minidist"),
            "registered": len(comm.registered.windows),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "in /dev/shm": maps.count("/dev/shm"),
        }

    def wrap(number):
        kind, options = kinds[number % len(kinds)]
        model = nn.Linear(4, 4)
        wrapped = kind(model, comm, op="sum", **options)
        wrapped(torch.ones(1, 4)).sum().backward()
        if number % 2:
            wrapped.unwrap()
        del wrapped
        for thread in threading.enumerate():  # they end by themselves, a moment later
            if "stream" in thread.name:
                thread.join(30)

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096

    for number in range(10):
        wrap(number)
    comm.barrier()
    before, grown = resources(), resident()
    most = groups(comm.wire.group.pool)
    for number in range(times):
        wrap(number)
    comm.barrier()
    assert resources() == before, (before, resources())
    assert before["windows"] == before["registered"] == 0
    assert groups(comm.wire.group.pool) == most, (most, groups(comm.wire.group.pool))
    assert resident() - grown < (8 << 20) + 4096 * times, f"{resident() - grown} bytes more"
    print(f"wrapped {times} times", flush=True)
"""


@pytest.mark.parametrize("launch", [mpirun, pytest.param(torchrun, marks=pytest.mark.soak)])
def test_wrapping_and_dropping_again_and_again_takes_nothing_more(launch: Any) -> None:
    outcome = launch(2, WRAPS, "40", timeout=200)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count("wrapped 40 times") == 2


def test_the_memory_of_mpi_ranks_outlives_the_wrapper_where_a_parameter_lies_in_it() -> None:
    program = """
        import os, sys
        import torch
        import minidist
        from minidist.full import ZeRO1

        comm = minidist.init(limit=60)
        windows = lambda: open("/proc/self/maps").read().count("memfd:minidist")
        model = torch.nn.Linear(300, 300)
        expected = ZeRO1(model, comm, op="sum").module.weight.detach().clone()
        model.zero_grad()  # gradients lie in a window as well
        assert windows() == 1 and torch.equal(model.weight, expected)
        weight = model.weight
        del model
        comm.barrier()
        assert windows() == 1 and torch.equal(weight, expected)
        if comm.rank == 0:
            del weight
            assert windows() == 0
        comm.barrier()
        if comm.rank == 1:
            weight.data.fill_(5)
            assert float(weight.sum()) == 5 * 300 * 300
        print("kept")
    """
    outcome = mpirun(2, program, timeout=100)
    assert outcome.stdout.count("kept") == 2, outcome.stdout + outcome.stderr


# ---- too little memory ----


def test_memory_that_cannot_be_reserved_is_refused_on_every_rank_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserve, files = os.posix_fallocate, len(os.listdir("/proc/self/fd"))

    def full(file: int, start: int, bytes: int) -> None:
        if start > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, start, bytes)

    monkeypatch.setattr(os, "posix_fallocate", full)

    def program(comm: Communicator) -> str:
        with pytest.raises(MemoryError) as caught:
            open_window(comm, 1 << 20)
        return str(caught.value)

    first, *others = minidist.run(program, 3)
    assert set(others) == {first}
    assert first.startswith(
        "the 3 ranks of this machine cannot have 1048576 bytes of shared memory each (rank 1: [Err"
    )
    assert (
        "No space left on device): give the machine or container more memory, start fewer ranks "
        "on it"
    ) in first
    assert len(os.listdir("/proc/self/fd")) == files
    gc.collect()  # the errors
    with open("/proc/self/maps") as maps:
        assert "memfd:minidist" not in maps.read()


def test_a_small_dev_shm_as_in_a_container_leaves_room_for_large_windows() -> None:
    """Windows that lie there end such a job with a bus error."""
    mount = "mount -t tmpfs -o size=32m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this user may not mount a /dev/shm of another size")
    program = """if True:
        import numpy as np
        import minidist
        from minidist.full.collectives import all_reduce
        comm = minidist.init(limit=60)
        buffer = comm.allocate(64 << 20, np.uint8)
        buffer[:] = comm.rank + 1
        all_reduce(buffer, comm)
        assert buffer.min() == buffer.max() == 3
    """
    launcher = find_mpirun()
    command = [launcher.path, "-n", "2", sys.executable, "-c", program]
    unshared = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
    outcome = run_job(
        unshared, env=environment(launcher) | clean_environment(), timeout=100, capture=True
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
