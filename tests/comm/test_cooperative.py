"""Ranks that take turns: the same program, the same numbers, whatever carries it."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from minidist import Cluster, Communicator, DeadlockError, Trace, run
from minidist.collectives import all_reduce
from minidist.comm import CommunicationError, LaunchError, LimitError
from minidist.comm.threads_wire import world as world_file
from minidist.comm.threads_wire.carriers import greenlets

UNIFORM = Cluster.uniform(1e-6, 1e9)
TURNS = ("cooperative", "greenlets")  # the engines on which exactly one rank runs
ON_BOTH = pytest.mark.parametrize("engine", TURNS)
ON_BOTH_CLOCKS = pytest.mark.parametrize(
    "cluster", (None, UNIFORM), ids=("machine's clock", "virtual clock")
)


@pytest.fixture(autouse=True)
def no_thread_stays_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 60
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"threads stayed behind: {left}"


def byte() -> np.ndarray:  # type: ignore[type-arg]
    return np.zeros(1, np.uint8)


def everything(comm: Communicator) -> tuple[object, ...]:
    """Use what a communicator has: messages, streams, groups, shared memory, polling."""
    values, stream = np.arange(1000.0) * (comm.rank + 1), comm.stream()
    handle = stream.launch(all_reduce, values, stream.comm, "sum", "ring")
    small = np.full(5, float(comm.rank))
    all_reduce(small, comm, algorithm="tree")
    handle.wait()
    half = comm.split(comm.rank % 2)
    all_reduce(values, half, algorithm="recursive")
    comm.levels(2).inside.barrier()
    fork = comm.fork()
    arriving = np.zeros(5)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    receive = fork.irecv(arriving, left)
    send = fork.isend(small * comm.rank, right)
    polls = 0
    while not receive.test():
        fork.advance(1e-6)
        polls += 1
    send.wait()
    registered = comm.allocate(50, np.float64)
    registered[:] = comm.rank  # type: ignore[index]
    all_reduce(registered, comm, algorithm="shared")
    called = comm.roll_call(comm.rank)
    sent = comm.traffic.messages_sent, comm.traffic.bytes_sent
    clocks = comm.clock(), fork.clock(), stream.comm.clock(), polls
    return values.tobytes(), arriving.tobytes(), registered.tobytes(), called, sent, clocks


@pytest.mark.parametrize("debug", (False, True))
@pytest.mark.parametrize("eager_limit", (0, 100))
def test_every_engine_gives_the_same_values_bytes_messages_and_clock(
    debug: bool, eager_limit: int
) -> None:
    how: Any = {"cluster": Cluster.h100(1), "eager_limit": eager_limit, "debug": debug}
    expected = run(everything, 7, **how)
    for engine in TURNS:
        for seed in range(3):
            assert run(everything, 7, engine=engine, seed=seed, **how) == expected


@ON_BOTH_CLOCKS
def test_a_deadlock_is_told_in_the_same_sentence_with_the_same_lines(
    cluster: Cluster | None,
) -> None:
    def program(comm: Communicator) -> None:
        stream = comm.stream()
        if comm.rank == 3:
            stream.launch(stream.comm.recv, byte(), 0, 4).wait()
        elif comm.rank < 3:
            comm.recv(byte(), (comm.rank + 1) % 3, tag=7)

    said = set()
    for engine in ("threads", *TURNS):
        with pytest.raises(DeadlockError) as caught:
            run(program, 5, cluster=cluster, engine=engine)
        said.add(str(caught.value))
    assert len(said) == 1
    assert re.search(r"rank 3\+1 waits: receive from rank 0 \(tag 4, 1 bytes\)", said.pop())


@ON_BOTH
@ON_BOTH_CLOCKS
def test_polling_in_vain_is_a_deadlock_and_polling_for_long_is_none(
    cluster: Cluster | None, engine: str
) -> None:
    def poll(comm: Communicator, posts: bool) -> None:
        request = comm.irecv(byte(), (comm.rank + 1) % comm.size)
        if posts:
            comm.barrier()
            comm.isend(byte(), (comm.rank - 1) % comm.size)
        while not request.test():
            comm.advance(1e-9)

    run(lambda comm: poll(comm, True), 3, cluster=cluster, engine=engine)
    with pytest.raises(DeadlockError, match="each waits for the next"):
        run(lambda comm: poll(comm, False), 3, cluster=cluster, engine=engine)


# ---------------------------------------------------------------- the order of turns


def turns(engine: str, seed: int, **how: Any) -> list[int]:
    """Return in which order ranks came to a line of a program."""
    order: list[int] = []

    def program(comm: Communicator) -> None:
        for _ in range(5):
            order.append(comm.rank)
            comm.barrier()

    run(program, 8, engine=engine, seed=seed, **how)
    return order


def test_a_seed_repeats_an_interleaving_on_either_engine_and_others_differ() -> None:
    orders = [turns("greenlets", seed) for seed in range(6)]
    assert [turns("cooperative", seed) for seed in range(6)] == orders
    assert len({tuple(order) for order in orders}) == 6
    assert len({order[0] for order in orders}) > 2, "the first rank is drawn as well"


def test_a_seed_repeats_a_trace_to_the_event() -> None:
    def events(engine: str, seed: int) -> list[object]:
        trace = Trace()
        run(everything, 5, cluster=UNIFORM, trace=trace, engine=engine, seed=seed)
        return list(trace.events)

    assert events("cooperative", 3) == events("cooperative", 3) == events("greenlets", 3)
    assert events("greenlets", 3) != events("greenlets", 4), "in another order"


@ON_BOTH
def test_nobody_is_interrupted_between_two_waits(engine: str) -> None:
    inside: list[int] = []

    def program(comm: Communicator) -> None:
        for _ in range(20):
            inside.append(comm.rank)
            time.sleep(0)  # where threads would change
            assert inside == [comm.rank]
            inside.clear()
            comm.barrier()

    run(program, 4, engine=engine)


@ON_BOTH
def test_a_rank_that_hands_over_lets_others_go_on(engine: str) -> None:
    def program(comm: Communicator) -> None:
        seen.append(comm.rank)
        if comm.rank == 0:
            while len(seen) < 3:
                comm.hand_over()

    seen: list[int] = []
    run(program, 3, engine=engine)
    assert sorted(seen) == [0, 1, 2]
    assert run(lambda comm: comm.hand_over(), 2) == [None, None]


# ---------------------------------------------------------------- what goes wrong


@ON_BOTH
def test_the_first_error_ends_all_ranks_and_names_its_own(engine: str) -> None:
    def program(comm: Communicator) -> None:
        stream = comm.stream()
        if comm.rank == 2:
            stream.launch(lambda: 1 / 0)
        comm.recv(byte(), (comm.rank + 1) % comm.size)

    with pytest.raises(ZeroDivisionError) as caught:
        run(program, 4, engine=engine)
    assert "[rank 2]" in caught.value.__notes__[0]


@ON_BOTH
def test_a_rank_that_keeps_its_turn_for_too_long_is_named(engine: str) -> None:
    def program(comm: Communicator) -> None:
        if comm.rank == 1:
            deadline = time.monotonic() + 2.0
            while time.monotonic() < deadline:
                pass  # here
        comm.barrier()

    with pytest.raises(LimitError) as caught:
        run(program, 3, engine=engine, limit=0.3)
    said = str(caught.value)
    assert re.search(r"^rank 1 has run for \S+ s and handed over to nobody, longer", said)
    assert re.search(r"\n  rank 1 computes at test_cooperative\.py:\d+ in program", said)


@ON_BOTH
def test_a_thread_of_the_users_own_is_refused(engine: str) -> None:
    caught: list[Exception] = []

    def program(comm: Communicator) -> None:
        def help() -> None:
            try:
                comm.send(byte(), 1 - comm.rank)
            except Exception as error:
                caught.append(error)

        helper = threading.Thread(target=help)
        helper.start()
        helper.join()

    run(program, 2, engine=engine)
    assert len(caught) == 2 and isinstance(caught[0], CommunicationError)
    assert "launch it on comm.stream(), or take engine='threads'" in str(caught[0])


@ON_BOTH
def test_ctrl_c_ends_ranks_that_take_turns(engine: str) -> None:
    program = f"""
        import signal, threading, time
        import minidist

        signal.signal(signal.SIGINT, signal.default_int_handler)

        def program(comm):
            if comm.rank == 0:
                print("started", flush=True)
            while True:
                comm.barrier()

        try:
            minidist.run(program, 3, engine="{engine}")
        except KeyboardInterrupt:
            time.sleep(0.5)
            left = [thread.name for thread in threading.enumerate() if "rank" in thread.name]
            print("interrupted", *left, flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    process.send_signal(2)
    assert process.communicate(timeout=60)[0] == "interrupted\n"


def test_what_says_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for how, said in (
        ({"engine": "fibers"}, "engine='fibers': choose one of threads, cooperative, greenlets"),
        ({"seed": 3}, "the system decides in which order threads run"),
        ({"schedule": ["rank 0"]}, "take engine='cooperative' as well"),
        ({"engine": "cooperative", "seed": 1, "schedule": []}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=said):
            run(lambda comm: None, 2, **how)  # type: ignore[arg-type]
    monkeypatch.setattr(greenlets, "greenlet", None)
    with pytest.raises(LaunchError, match="pip install greenlet, or take engine='cooperative'"):
        run(lambda comm: None, 2, engine="greenlets")


def no_grad(comm: Communicator) -> None:
    with torch.no_grad():
        comm.barrier()


def backward(comm: Communicator) -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: comm.barrier())
    weight.sum().backward()


def autocast(comm: Communicator) -> None:
    with torch.autocast("cpu"):
        comm.barrier()


def device(comm: Communicator) -> None:
    with torch.device("meta"):
        comm.barrier()


def hooks(comm: Communicator) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        comm.barrier()


@pytest.mark.parametrize(
    ("program", "mode"),
    (
        (no_grad, r"torch\.no_grad\(\)"),
        (backward, "a backward"),
        (autocast, r"torch\.autocast"),
        (device, "a TorchFunctionMode"),
        (hooks, "hooks for saved tensors"),
    ),
)
def test_greenlets_refuse_to_wait_where_others_would_compute_wrongly(
    program: Callable[[Communicator], None], mode: str
) -> None:
    run(program, 3, engine="cooperative")
    with pytest.raises(CommunicationError, match=rf"rank \d waits inside .*{mode}.*cooperative"):
        run(program, 3, engine="greenlets")
    assert torch.is_grad_enabled()


def test_greenlets_may_begin_as_deep_as_the_recursion_of_another() -> None:
    """Hundreds of ranks, each started while another one waits in the depth of its own calls."""

    def dive(comm: Communicator, depth: int) -> None:
        if depth:
            dive(comm, depth - 1)
        else:
            comm.barrier()

    assert len(run(lambda comm: dive(comm, 600), 300, engine="greenlets")) == 300


# ---------------------------------------------------------------- what a message costs


@pytest.mark.parametrize("engine", ("threads", *TURNS))
def test_a_message_costs_the_same_however_many_ranks_there_are(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: how often it is asked whether a lane may go on, and how often all lanes are looked
    at.
    """
    asked, looked = [0], [0]
    ready, lanes = world_file.Operation.ready, world_file.World.lanes

    def counted(operation: Any) -> bool:
        asked[0] += 1
        return ready(operation)

    def listed(world: Any) -> Any:
        looked[0] += 1
        return lanes(world)

    monkeypatch.setattr(world_file.Operation, "ready", counted)
    monkeypatch.setattr(world_file.World, "lanes", listed)

    def program(comm: Communicator) -> None:
        for _ in range(20):
            comm.exchange(byte(), (comm.rank + 1) % comm.size, byte(), (comm.rank - 1) % comm.size)

    for ranks in (4, 64):
        asked[0] = looked[0] = 0
        run(program, ranks, cluster=UNIFORM, engine=engine)
        assert asked[0] <= 10 * 20 * ranks, "at most ten times an exchange"
        assert looked[0] <= 3, "at the end of the run"


def test_a_roll_call_and_a_split_make_their_tables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [0]
    group = world_file.Group.__init__

    def counted(self: Any, members: tuple[int, ...]) -> None:
        made[0] += len(members)
        group(self, members)

    monkeypatch.setattr(world_file.Group, "__init__", counted)

    def program(comm: Communicator) -> int:
        levels = comm.levels()
        return len(comm.fork().nodes) + levels.inside.size

    assert run(program, 64, cluster=Cluster.h100(8), engine="greenlets") == [64 + 8] * 64
    assert made[0] == 4 * 64, "the world, its nodes, the ranks across, the fork"


def test_the_baton_is_passed_by_as_many_threads_as_there_are_ranks() -> None:
    names = run(lambda comm: threading.current_thread().name, 3, engine="cooperative")
    assert names == ["rank 0", "rank 1", "rank 2"]
    assert run(lambda comm: threading.current_thread().name, 3, engine="greenlets") == ["ranks"] * 3
