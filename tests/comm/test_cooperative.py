"""Ranks that take turns: the same program, the same numbers, whatever carries it."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cooperative_cases import (
    CASES,
    UNIFORM,
    Case,
    a_deadlock_with_its_cycle_and_its_lines,
    byte,
    everything,
)

from minidist import Cluster, Communicator, run
from minidist.full.comm import CommunicationError, LimitError
from minidist.full.comm.threads_wire import world as world_file

# the engines on which exactly one rank runs; a third is in tests/run_here, which needs a browser
TURNS = ("cooperative",)
ON_BOTH = pytest.mark.parametrize("engine", TURNS)


@pytest.fixture(autouse=True)
def no_thread_stays_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 60
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"threads stayed behind: {left}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_engine_on_which_ranks_take_turns_gives_the_same(case: Case) -> None:
    first, *others = [case(engine) for engine in TURNS]
    assert all(other == first for other in others)


def test_threads_give_the_same_values_bytes_messages_and_clock() -> None:
    for how in itertools.product((False, True), (0, 100)):
        options: Any = {"cluster": Cluster.h100(1), "debug": how[0], "eager_limit": how[1]}
        assert run(everything, 7, **options) == run(everything, 7, engine=TURNS[0], **options)


def test_threads_say_the_same_of_a_deadlock() -> None:
    case = a_deadlock_with_its_cycle_and_its_lines
    assert case("threads") == case(TURNS[0])


def test_threads_need_not_hand_over_and_may() -> None:
    assert run(lambda comm: comm.hand_over(), 2) == [None, None]


# ---------------------------------------------------------------- what goes wrong


@ON_BOTH
def test_a_rank_that_keeps_its_turn_for_too_long_is_named(engine: str) -> None:
    def program(comm: Communicator) -> None:
        if comm.rank == 1:
            deadline = time.monotonic() + 4.0
            while time.monotonic() < deadline:
                pass  # here
        comm.barrier()

    with pytest.raises(LimitError) as caught:
        run(program, 3, engine=engine, limit=1.0)
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


def test_what_says_nothing_is_refused() -> None:
    for how, said in (
        ({"engine": "fibers"}, "engine='fibers': choose one of threads, cooperative"),
        ({"seed": 3}, "the system decides in which order threads run"),
    ):
        with pytest.raises(ValueError, match=said):
            run(lambda comm: None, 2, **how)  # type: ignore[arg-type]


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

    assert run(program, 64, cluster=Cluster.h100(8), engine="cooperative") == [64 + 8] * 64
    assert made[0] == 4 * 64, "the world, its nodes, the ranks across, the fork"


def test_the_baton_is_passed_by_as_many_threads_as_there_are_ranks() -> None:
    names = run(lambda comm: threading.current_thread().name, 3, engine="cooperative")
    assert names == ["rank 0", "rank 1", "rank 2"]
