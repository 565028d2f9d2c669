"""All interleavings of a small program that can differ are tried, and no others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from minidist import Cluster, Communicator, DeadlockError, run
from minidist.collectives import all_reduce
from minidist.comm import LaunchError, RankFailed, explore


def byte() -> np.ndarray:  # type: ignore[type-arg]
    return np.zeros(1, np.uint8)


def race(comm: Communicator, board: list[int]) -> list[int]:
    """Rank 0 tells rank 1, which writes at once, and then rank 2 in ten messages, which reads."""
    if comm.rank == 0:
        comm.send(byte(), 1)
        for _ in range(10):
            comm.send(byte(), 2)
    elif comm.rank == 1:
        comm.recv(byte(), 0)
        board.append(7)
    else:
        for _ in range(10):
            comm.recv(byte(), 0)
    return list(board) if comm.rank == 2 else []


def test_a_race_is_found_that_threads_hardly_ever_show() -> None:
    shown = 0
    for _ in range(300):
        board: list[int] = []
        shown += run(lambda comm, board=board: race(comm, board), 3)[2] != [7]  # type: ignore[misc]
    assert shown < 30, "a busy machine may let rank 1 starve for ten messages, but seldom"
    found = explore(race, 3, shared=list)
    assert found.verdict == "other values" and found.interleavings < 20
    assert (found.values[2], found.expected[2]) == ([], [7])
    assert "in the last one, [[], [], []] in place of [[], [], [7]]" in str(found)


@pytest.mark.parametrize("engine", ("cooperative", "greenlets"))
def test_what_was_found_can_be_repeated_by_its_schedule(engine: str) -> None:
    found = explore(race, 3, shared=list, engine=engine)
    for schedule, expected in ((found.schedule, found.values), (found.first, found.expected)):
        for _ in range(3):
            board: list[int] = []
            again = run(
                lambda comm, board=board: race(comm, board),  # type: ignore[misc]
                3,
                engine=engine,
                schedule=schedule,
            )
            assert again == expected
    with pytest.raises(LaunchError, match="step 0 of the schedule is of rank 5, but only rank 0"):
        run(lambda comm: comm.barrier(), 3, engine=engine, schedule=["rank 5"])


def unlucky(comm: Communicator) -> None:
    """Rank 0 takes a message that has come already for a sign of another one."""
    if comm.rank == 0:
        request = comm.irecv(byte(), 1)
        if request.test():
            comm.recv(byte(), 2)
        request.wait()
    elif comm.rank == 1:
        comm.send(byte(), 0)


def test_a_deadlock_that_only_some_interleavings_have_is_found() -> None:
    found = explore(unlucky, 3)
    assert found.verdict == "deadlock" and found.interleavings > 1
    assert "rank 0 waits: receive from rank 2" in str(found)
    with pytest.raises(DeadlockError, match="receive from rank 2"):
        run(unlucky, 3, engine="cooperative", schedule=found.schedule)
    run(unlucky, 3, engine="cooperative", schedule=found.first)


def test_a_missing_fence_is_found_and_none_is_missed_where_there_is_one() -> None:
    def program(comm: Communicator, fenced: bool) -> float:
        mine = comm.allocate(4, np.float64)
        mine[:] = comm.rank + 1  # type: ignore[index]
        if fenced:
            comm.fence()
        else:
            comm.hand_over()
        everyones = comm.peers(mine)
        assert everyones is not None
        total = float(sum(view[0] for view in everyones))
        comm.barrier()
        return total

    assert explore(lambda comm: program(comm, False), 2).verdict == "other values"
    right = explore(lambda comm: program(comm, True), 2)
    assert right.verdict == "all alike" and right.complete, right


def test_an_update_between_which_another_rank_fits_is_lost() -> None:
    def program(comm: Communicator, count: list[int]) -> int:
        seen = count[0]
        comm.hand_over()
        count[0] = seen + 1
        comm.barrier()
        return count[0]

    found = explore(program, 3, shared=lambda: [0])
    assert found.verdict == "other values" and found.values == [2] * 3


def test_an_error_of_some_interleavings_is_told() -> None:
    def program(comm: Communicator, tasks: list[int]) -> int:
        comm.hand_over()
        return tasks.pop() if comm.rank or tasks else 0

    found = explore(program, 3, shared=lambda: [1, 2])
    assert found.verdict == "error" and isinstance(found.error, IndexError)
    assert not isinstance(found.error, RankFailed)


@pytest.mark.parametrize("algorithm", ("ring", "recursive", "tree"))
def test_messages_that_name_their_source_commute(algorithm: str) -> None:
    def program(comm: Communicator) -> Any:
        values = np.arange(5.0) + comm.rank
        all_reduce(values, comm, algorithm=algorithm)
        stream = comm.stream()
        stream.launch(all_reduce, values, stream.comm).wait()
        return values

    for cluster in (None, Cluster.uniform(1e-6, 1e9)):
        found = explore(program, 3, cluster=cluster)
        assert (found.verdict, found.interleavings, found.complete) == ("all alike", 1, True)


Action = tuple[Any, ...]


def scripts(seed: int, ranks: int, kinds: str, count: int) -> list[list[Action]]:
    """Return what each rank does in a random program."""
    plan = random.Random(seed)
    found: list[list[Action]] = [[] for _ in range(ranks)]
    for number in range(count):
        kind, (one, other) = plan.choice(kinds), plan.sample(range(ranks), 2)
        if kind in "mp":  # a message, which is received, or polled
            found[one].append(("send", other, number))
            found[other].append(("receive" if kind == "m" else "poll", one, number))
        elif kind == "w":
            found[one].append(("write", plan.randrange(2), number + 7 * one))
        else:
            found[one].append(("read", plan.randrange(2)) if kind == "r" else ("hand over",))
    return found


def outcomes(actions: list[list[Action]], reduce: bool) -> tuple[set[str], int]:
    """Return all that can come out, and how many interleavings have shown it."""
    ends: list[tuple[int, list[Any]]] = []
    found: set[str] = set()

    def fresh() -> list[int]:
        ends.clear()
        return [0, 0]

    def program(comm: Communicator, state: list[int]) -> None:
        seen: list[Any] = []
        requests = []
        for name, *arguments in actions[comm.rank]:
            if name == "send":
                requests.append(comm.isend(byte(), *arguments))
            elif name == "receive":
                comm.recv(byte(), *arguments)
            elif name == "poll":
                requests.append(comm.irecv(byte(), *arguments))
                seen.append(requests[-1].test())
            elif name == "write":
                state[arguments[0]] = 3 * state[arguments[0]] + arguments[1]
            elif name == "read":
                seen.append(state[arguments[0]])
            else:
                comm.hand_over()
        for request in requests:
            request.wait()
        ends.append((comm.rank, seen))
        if len(ends) == comm.size:
            found.add(repr((sorted(ends), state)))

    explored = explore(
        program, len(actions), shared=fresh, reduce=reduce, engine="greenlets", most=100_000
    )
    assert explored.complete and explored.verdict == "all alike", explored
    return found, explored.interleavings + explored.redundant


@pytest.mark.parametrize(
    ("ranks", "kinds", "count", "seeds"), ((2, "mprwh", 3, 8), (3, "rwh", 4, 25))
)
def test_what_is_left_out_would_have_shown_nothing_else(
    ranks: int, kinds: str, count: int, seeds: int
) -> None:
    """Of random programs, the interleavings that are tried show all that any interleaving can."""
    fewer = all_ = 0
    for seed in range(seeds):
        actions = scripts(seed, ranks, kinds, count)
        reduced, tried = outcomes(actions, reduce=True)
        full, most = outcomes(actions, reduce=False)
        assert reduced == full, (seed, actions)
        fewer, all_ = fewer + tried, all_ + most
    assert 3 * fewer < all_, (fewer, all_)


def test_a_program_that_does_not_repeat_itself_is_refused() -> None:
    left: list[int] = []

    def program(comm: Communicator, board: list[int]) -> None:
        left.append(1)
        if comm.rank == 0 and len(left) > 4:
            return
        comm.hand_over()
        board.append(comm.rank)

    with pytest.raises(RuntimeError, match="the program does not repeat itself: at step"):
        explore(program, 2, shared=list)


def test_exploring_ends_after_most_interleavings_and_says_so() -> None:
    def program(comm: Communicator, board: list[int]) -> None:
        for _ in range(4):
            board.append(0)
            comm.hand_over()

    found = explore(program, 3, shared=list, most=10)
    assert not found.complete and "there are more: raise most=" in str(found)
