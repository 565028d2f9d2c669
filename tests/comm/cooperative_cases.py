"""Programs of ranks that take turns, and what they are to give on every carrier, in a browser too.

A case takes the name of an engine, sees for itself that what must hold does, and returns what must
be the same on all engines. Nothing here needs torch or pytest: a browser has neither.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from minidist import Cluster, Communicator, DeadlockError, Trace, run
from minidist.full.collectives import all_reduce

UNIFORM = Cluster.uniform(1e-6, 1e9)
CLOCKS = (None, UNIFORM)  # this machine's, a virtual one


def byte() -> Any:
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
    called = comm.all_gather_object(comm.rank)
    sent = comm.traffic.messages, comm.traffic.bytes
    clocks = comm.clock(), fork.clock(), stream.comm.clock(), polls
    contents = [digest(each.tobytes()) for each in (values, arriving, registered)]
    return contents, called, sent, clocks


def digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def turns(engine: str, seed: int, **how: Any) -> list[int]:
    """Return in which order ranks came to a line of a program."""
    order: list[int] = []

    def program(comm: Communicator) -> None:
        for _ in range(5):
            order.append(comm.rank)
            comm.barrier()

    run(program, 8, engine=engine, seed=seed, **how)
    return order


# ---------------------------------------------------------------- cases


def values_bytes_messages_and_clocks(engine: str) -> object:
    """Of everything that a communicator has, whatever the seed."""
    found = []
    for debug in (False, True):
        for eager_limit in (0, 100):
            how: Any = {"cluster": Cluster.h100(1), "eager_limit": eager_limit, "debug": debug}
            first = run(everything, 7, engine=engine, **how)
            for seed in (1, 2):
                assert run(everything, 7, engine=engine, seed=seed, **how) == first
            found.append(first)
    return found


def an_all_reduce_of_64_ranks(engine: str) -> object:
    """The sums, and when each rank has them on the virtual clock."""
    cluster = Cluster.h100(8)

    def program(comm: Communicator) -> tuple[str, str]:
        values = np.linspace(0.0, 1.0, 1000) * (comm.rank + 1)
        all_reduce(values, comm, algorithm="recursive")
        assert np.allclose(values, np.linspace(0.0, 1.0, 1000) * (64 * 65 / 2), rtol=1e-12)
        return digest(values.tobytes()), comm.clock().hex()

    return run(program, 64, cluster=cluster, engine=engine)


def a_deadlock_with_its_cycle_and_its_lines(engine: str) -> object:
    """The same sentence, on both clocks."""

    def program(comm: Communicator) -> None:
        stream = comm.stream()
        if comm.rank == 3:
            stream.launch(stream.comm.recv, byte(), 0, 4).wait()
        elif comm.rank < 3:
            comm.recv(byte(), (comm.rank + 1) % 3, tag=7)

    said = []
    for cluster in CLOCKS:
        try:
            run(program, 5, cluster=cluster, engine=engine)
        except DeadlockError as error:
            said.append(str(error))
    assert len(said) == 2
    assert re.search(r"rank 3\+1 waits: receive from rank 0 \(tag 4, 1 bytes\)", said[0])
    assert re.search(r"rank 1 waits.* at cooperative_cases\.py:\d+ in program", said[0])
    assert "each waits for the next: 0 -> 1 -> 2 -> 0" in said[0]
    return said


def polling_in_vain_is_a_deadlock_and_for_long_is_none(engine: str) -> object:
    """On both clocks."""

    def poll(comm: Communicator, posts: bool) -> None:
        request = comm.irecv(byte(), (comm.rank + 1) % comm.size)
        if posts:
            comm.barrier()
            comm.isend(byte(), (comm.rank - 1) % comm.size)
        while not request.test():
            comm.advance(1e-9)

    said = []
    for cluster in CLOCKS:
        run(lambda comm: poll(comm, True), 3, cluster=cluster, engine=engine)
        try:
            run(lambda comm: poll(comm, False), 3, cluster=cluster, engine=engine)
        except DeadlockError as error:
            said.append(str(error))
    assert len(said) == 2 and "each waits for the next" in said[0]
    return said


def a_seed_makes_an_interleaving(engine: str) -> object:
    """Another seed makes another one; the first rank is drawn as well."""
    orders = [turns(engine, seed) for seed in range(6)]
    assert len({tuple(order) for order in orders}) == 6
    assert len({order[0] for order in orders}) > 2
    return orders


def a_seed_makes_a_trace(engine: str) -> object:
    """To the event; another seed makes another order."""

    def events(seed: int) -> list[str]:
        trace = Trace()
        run(everything, 5, cluster=UNIFORM, trace=trace, engine=engine, seed=seed)
        return list(map(str, trace.events))

    assert events(3) == events(3) != events(4)
    return events(3)


def nobody_is_interrupted_between_two_waits(engine: str) -> object:
    inside: list[int] = []

    def program(comm: Communicator) -> None:
        for _ in range(20):
            inside.append(comm.rank)
            time.sleep(0)  # where threads would change
            assert inside == [comm.rank]
            inside.clear()
            comm.barrier()

    return run(program, 4, engine=engine)


def who_hands_over_lets_others_go_on(engine: str) -> object:
    seen: list[int] = []

    def program(comm: Communicator) -> None:
        seen.append(comm.rank)
        if comm.rank == 0:
            while len(seen) < 3:
                comm.hand_over()

    run(program, 3, engine=engine)
    return sorted(seen)


def the_first_error_ends_all_ranks_and_names_its_own(engine: str) -> object:
    def program(comm: Communicator) -> None:
        stream = comm.stream()
        if comm.rank == 2:
            stream.launch(lambda: 1 / 0)
        comm.recv(byte(), (comm.rank + 1) % comm.size)

    try:
        run(program, 4, engine=engine)
    except ZeroDivisionError as error:
        assert "[rank 2]" in error.__notes__[0]
        return error.__notes__
    raise AssertionError("it was to be raised")


def ranks_may_begin_as_deep_as_the_recursion_of_others(engine: str) -> object:
    """Hundreds, each started while another one waits in the depth of its own calls."""

    def dive(comm: Communicator, depth: int) -> None:
        if depth:
            dive(comm, depth - 1)
        else:
            comm.barrier()

    return len(run(lambda comm: dive(comm, 600), 300, engine=engine))


def a_rank_keeps_its_own_errors(engine: str) -> object:
    """What is being handled while a rank waits is the rank's own."""

    def program(comm: Communicator) -> str:
        try:
            raise KeyError(comm.rank)
        except KeyError:
            comm.barrier()
            try:
                raise ValueError(comm.rank) from None
            except ValueError as error:
                comm.barrier()
                return f"{error!r} {error.__context__!r}"

    return run(program, 4, engine=engine)


def a_slow_clock_keeps_the_order_of_what_a_rank_does(engine: str) -> object:
    """Its calls take microseconds, and a browser's clock ticks every hundred of them."""

    def program(comm: Communicator) -> list[bool]:
        comm.trace = trace = Trace()
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for _ in range(20):
            if comm.rank:
                comm.recv(byte(), left)
            comm.send(byte(), right)
            if not comm.rank:
                comm.recv(byte(), left)
        events = trace.events
        return [a.end < b.start < b.end for a, b in pairwise(events)]

    clock, ticks = time.perf_counter, 1e4
    time.perf_counter = lambda: clock() * ticks // 1 / ticks  # type: ignore[assignment]
    try:
        found = run(program, 3, engine=engine)
    finally:
        time.perf_counter = clock
    assert all(map(all, found)) and len(found[0]) == 39
    return found


Case = Callable[[str], object]
CASES: tuple[Case, ...] = (
    values_bytes_messages_and_clocks,
    an_all_reduce_of_64_ranks,
    a_deadlock_with_its_cycle_and_its_lines,
    polling_in_vain_is_a_deadlock_and_for_long_is_none,
    a_seed_makes_an_interleaving,
    a_seed_makes_a_trace,
    nobody_is_interrupted_between_two_waits,
    who_hands_over_lets_others_go_on,
    the_first_error_ends_all_ranks_and_names_its_own,
    ranks_may_begin_as_deep_as_the_recursion_of_others,
    a_rank_keeps_its_own_errors,
    a_slow_clock_keeps_the_order_of_what_a_rank_does,
)
