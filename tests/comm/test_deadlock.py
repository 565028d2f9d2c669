"""A deadlock of simulated ranks is proved at once and explained; a program that can go on is never
accused.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Cluster, Communicator, DeadlockError, run
from minidist.full.collectives import all_reduce

UNIFORM = Cluster.uniform(1e-6, 1e9)
ON_BOTH_CLOCKS = pytest.mark.parametrize(
    "cluster", (None, UNIFORM), ids=("machine's clock", "virtual clock")
)


def byte() -> np.ndarray:  # type: ignore[type-arg]
    return np.zeros(1, np.uint8)


def report(
    program: Callable[[Communicator], object], ranks: int, cluster: Cluster | None = None
) -> str:
    """Return what is said about a deadlock, which must be found within a second (five on a busy
    machine).
    """
    started, worked = time.monotonic(), time.process_time()
    with pytest.raises(DeadlockError) as caught:
        run(program, ranks, cluster=cluster)
    assert time.process_time() - worked < 1 and time.monotonic() - started < 5
    return str(caught.value)


@ON_BOTH_CLOCKS
@pytest.mark.parametrize("ranks", (2, 3, 16))
def test_a_cycle_of_receives(ranks: int, cluster: Cluster | None) -> None:
    def program(comm: Communicator) -> None:
        comm.recv(byte(), (comm.rank + 1) % comm.size, tag=7)

    said = report(program, ranks, cluster)
    for rank in range(ranks):
        line = rf"rank {rank} waits: receive from rank {(rank + 1) % ranks} \(tag 7, 1 bytes\) at test_deadlock\.py:\d+"
        assert re.search(line, said), said
    assert "each waits for the next: 0 -> 1" in said and said.endswith("-> 0")


@ON_BOTH_CLOCKS
def test_a_cycle_that_not_all_ranks_are_in(cluster: Cluster | None) -> None:
    def program(comm: Communicator) -> None:
        comm.recv(byte(), {0: 1, 1: 2, 2: 3, 3: 1}[comm.rank])

    assert "each waits for the next: 1 -> 2 -> 3 -> 1" in report(program, 4, cluster)


@ON_BOTH_CLOCKS
def test_a_chain_that_ends_in_a_rank_that_has_finished(cluster: Cluster | None) -> None:
    def program(comm: Communicator) -> None:
        if comm.rank < 2:
            comm.recv(byte(), comm.rank + 1)

    assert "rank 0 waits for rank 1 waits for rank 2, which has finished" in report(
        program, 4, cluster
    )


@ON_BOTH_CLOCKS
def test_a_tag_that_never_matches(cluster: Cluster | None) -> None:
    def program(comm: Communicator) -> None:
        comm.send(byte(), 1, tag=1) if comm.rank == 0 else comm.recv(byte(), 0, tag=2)

    said = report(program, 2, cluster)
    assert "rank 0 waits: send to rank 1 (tag 1, 1 bytes)" in said
    assert "rank 1 waits: receive from rank 0 (tag 2, 1 bytes)" in said


def test_the_line_named_is_the_callers_own() -> None:
    def program(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.recv(byte(), 1)  # here
        else:
            all_reduce(np.zeros(100), comm)  # there

    lines = open(__file__, encoding="utf-8").read().splitlines()  # noqa: SIM115
    here, there = (
        1 + next(n for n, line in enumerate(lines) if line.endswith(end))
        for end in ("# here", "# there")
    )
    said = report(program, 2)
    assert (
        f"rank 0 waits: receive from rank 1 (tag 0, 1 bytes) at test_deadlock.py:{here} in program"
        in said
    )
    assert f"in all_reduce at test_deadlock.py:{there} in program" in said


@ON_BOTH_CLOCKS
@pytest.mark.parametrize(
    "call", ("barrier", "split", "fork", "allocate", "all_gather_object", "all_reduce")
)
def test_a_call_of_all_ranks_that_one_does_not_make(call: str, cluster: Cluster | None) -> None:
    def program(comm: Communicator) -> None:
        arguments: dict[str, tuple[object, ...]] = {
            "split": (0,),
            "allocate": (3, "f4"),
            "all_gather_object": (None,),
        }
        if comm.rank == 2:
            return
        if call == "all_reduce":
            all_reduce(np.zeros(3), comm)
        elif call == "fork":
            comm.fork().barrier()
        else:
            getattr(comm, call)(*arguments.get(call, ()))

    assert "rank 2, which has finished" in report(program, 3, cluster)


@ON_BOTH_CLOCKS
@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_programs_that_only_poll(ranks: int, cluster: Cluster | None) -> None:
    def program(comm: Communicator) -> None:
        requests = [comm.irecv(byte(), (comm.rank + 1) % comm.size, tag) for tag in range(3)]
        while False in {request.test() for request in requests}:
            comm.advance(1e-6)  # time passes, but nothing comes

    assert "each waits for the next" in report(program, ranks, cluster)


@ON_BOTH_CLOCKS
def test_one_polls_and_one_waits(cluster: Cluster | None) -> None:
    def program(comm: Communicator) -> None:
        request = comm.irecv(byte(), 1 - comm.rank)
        while comm.rank == 0 and not request.test():
            pass
        request.wait()

    report(program, 2, cluster)


@ON_BOTH_CLOCKS
@pytest.mark.parametrize("unposted", (1, 2, 3))
def test_polling_several_messages_of_which_one_unlocks_the_others_is_no_deadlock(
    cluster: Cluster | None, unposted: int
) -> None:
    """The poller's answer to the message that has come is what makes the others come."""

    def program(comm: Communicator) -> None:
        for _ in range(4):
            if comm.rank == 0:
                first = comm.irecv(byte(), 1, tag=100)
                later, answered = [comm.irecv(byte(), 1, tag) for tag in range(unposted)], False
                while False in {request.test() for request in later}:
                    if not answered and first.test():
                        comm.send(byte(), 1)
                        answered = True
            else:
                time.sleep(0.05)  # until the poller has lost its patience
                comm.advance(1e-3)
                comm.send(byte(), 0, tag=100)
                comm.recv(byte(), 0)
                for tag in range(unposted):
                    comm.send(byte(), 0, tag)

    run(program, 2, cluster=cluster)


def test_a_poller_notices_one_message_while_it_waits_for_another() -> None:
    def program(comm: Communicator) -> float:
        started = time.monotonic()
        if comm.rank == 1:
            time.sleep(0.2)  # until the poller has lost its patience
            comm.send(byte(), 0, tag=5)
            time.sleep(1.5)  # and what it might wait for comes much later
            for tag in range(5):
                comm.send(byte(), 0, tag)
            return 0.0
        requests = [comm.irecv(byte(), 1, tag) for tag in range(6)]
        while not requests[5].test():
            for request in requests[:5]:
                request.test()
        noticed = time.monotonic() - started
        for request in requests:
            request.wait()
        return noticed

    assert run(program, 2)[0] < 1.5


@ON_BOTH_CLOCKS
def test_polling_more_messages_than_patience_lasts_is_no_deadlock(cluster: Cluster | None) -> None:
    def program(comm: Communicator) -> None:
        count, peer = 2500, 1 - comm.rank
        receives = [comm.irecv(byte(), peer, tag) for tag in range(count)]
        sends = [comm.isend(byte(), peer, tag) for tag in reversed(range(count))]
        open_requests = set(receives + sends)
        while open_requests:
            open_requests -= {request for request in list(open_requests) if request.test()}

    run(program, 2, cluster=cluster)


def test_polling_in_vain_is_forgiven_whenever_something_was_posted() -> None:
    def program(comm: Communicator) -> int:
        steps = 1500
        if comm.rank == 1:
            for tag in range(steps):
                comm.recv(byte(), 0, tag)
            comm.send(byte(), 0)
            return steps
        last, step = comm.irecv(byte(), 1), 0
        while not last.test():
            comm.advance(1e-9)
            if step < steps:
                comm.send(byte(), 1, step)
                step += 1
        return step

    assert run(program, 2, cluster=Cluster.uniform(0, 1e9)) == [1500, 1500]


def test_a_rank_that_computes_for_long_is_no_deadlock() -> None:
    def program(comm: Communicator) -> None:
        if comm.rank == 0:
            time.sleep(0.7)
            comm.send(byte(), 1)
        elif comm.rank == 1:
            comm.recv(byte(), 0)
            comm.send(byte(), 2)
        else:
            request = comm.irecv(byte(), 1)
            while not request.test():
                pass

    run(program, 3)


def test_a_deadlock_in_one_group_is_found_once_the_others_are_done() -> None:
    def program(comm: Communicator) -> None:
        pair = comm.split(comm.rank // 2)
        if comm.rank < 2:
            pair.recv(byte(), 1 - pair.rank)
        else:
            time.sleep(0.1)
            pair.barrier()

    assert "each waits for the next: 0 -> 1 -> 0" in report(program, 4)


def legal_program(comm: Communicator, seed: int, messages: int, style: str) -> int:
    """Post all messages of a random plan without waiting, in random order, then wait or poll in
    random order.

    Messages of one tag between two ranks are posted in their order at both ends, all else is
    shuffled.
    """
    plan = random.Random(seed)
    edges = []
    for number in range(messages):
        sender, receiver = plan.sample(range(comm.size), 2)
        edges.append((sender, receiver, plan.randrange(3), number))
    mine = random.Random(seed * 1000 + comm.rank)
    own = [edge for edge in edges if comm.rank in edge[:2]]
    queues: dict[tuple[int, int, int], list[tuple[int, int, int, int]]] = {}
    for edge in own:
        queues.setdefault(edge[:3], []).append(edge)
    keys = [edge[:3] for edge in own]
    mine.shuffle(keys)
    requests = []
    for key in keys:
        sender, receiver, tag, number = queues[key].pop(0)
        if comm.rank == sender:
            requests.append((comm.isend(np.full(number % 5, number), receiver, tag), None, number))
        else:
            buffer = np.zeros(number % 5, np.int64)
            requests.append((comm.irecv(buffer, sender, tag), buffer, number))
    mine.shuffle(requests)
    while requests:
        request, buffer, number = requests.pop()
        if style == "poll" and not request.test():
            requests.insert(mine.randrange(len(requests) + 1), (request, buffer, number))
            comm.advance(1e-7)
            continue
        request.wait()
        assert buffer is None or (buffer == number).all(), "a message was lost or taken for another"
    return len(own)


@given(
    ranks=st.integers(2, 8),
    messages=st.integers(0, 60),
    seed=st.integers(0, 1 << 20),
    style=st.sampled_from(["wait", "poll"]),
    cluster=st.sampled_from([None, UNIFORM]),
    eager_limit=st.sampled_from([0, 16, 100]),
)
@settings(max_examples=120, deadline=None)
def test_random_legal_programs_pass(
    ranks: int, messages: int, seed: int, style: str, cluster: Cluster | None, eager_limit: int
) -> None:
    counts = run(
        lambda comm: legal_program(comm, seed, messages, style),
        ranks,
        cluster=cluster,
        eager_limit=eager_limit,
    )
    assert sum(counts) == 2 * messages


@given(ranks=st.integers(2, 6), seed=st.integers(0, 1 << 20))
@settings(max_examples=30, deadline=None)
def test_a_random_legal_program_that_lacks_one_message_is_always_found(
    ranks: int, seed: int
) -> None:
    def program(comm: Communicator) -> None:
        extra = (
            comm.irecv(byte(), (comm.rank + 1) % comm.size, tag=9)
            if comm.rank == seed % ranks
            else None
        )
        legal_program(comm, seed, 20, "wait")
        if extra is not None:
            extra.wait()

    assert f"rank {seed % ranks} waits for rank" in report(program, ranks)
