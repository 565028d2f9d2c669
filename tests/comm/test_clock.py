"""The virtual clock: what modelled clusters are said to take, exactly, and the same in every
run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from minidist import Cluster, Communicator, run
from minidist.full.collectives import all_reduce, all_to_all, broadcast
from minidist.full.comm import Link

LATENCY, BANDWIDTH = 3e-6, 2e9
UNIFORM = Cluster.uniform(LATENCY, BANDWIDTH)


def meta(bytes: int) -> torch.Tensor:
    return torch.empty(bytes, dtype=torch.uint8, device="meta")


def seconds(
    program: Callable[[Communicator], object], ranks: int, cluster: Cluster = UNIFORM
) -> list[float]:
    """Return each rank's clock at the end."""

    def timed(comm: Communicator) -> float:
        program(comm)
        return comm.clock()

    return run(timed, ranks, cluster=cluster)


@pytest.mark.parametrize("ranks", (*range(2, 25), 31, 32, 33, 48, 63, 64))
def test_a_ring_all_reduce_takes_exactly_its_formula(ranks: int) -> None:
    n = ranks * (1 << 20)
    expected = 2 * (ranks - 1) * (LATENCY + n / (ranks * BANDWIDTH))
    times = seconds(lambda comm: all_reduce(meta(n), comm, algorithm="ring"), ranks)
    assert times == pytest.approx([expected] * ranks, rel=1e-12, abs=0)


def test_a_message_takes_latency_plus_bytes_over_bandwidth() -> None:
    def program(comm: Communicator) -> None:
        comm.send(meta(2000), 1) if comm.rank == 0 else comm.recv(meta(2000), 0)

    busy = 2000 / BANDWIDTH
    assert seconds(program, 2) == pytest.approx([busy, busy + LATENCY], rel=1e-12)


def test_a_message_leaves_when_both_ends_are_there() -> None:
    def program(comm: Communicator) -> None:
        comm.advance(1.0 if comm.rank == 0 else 5.0)
        comm.send(meta(0), 1) if comm.rank == 0 else comm.recv(meta(0), 0)

    assert seconds(program, 2) == pytest.approx([5, 5 + LATENCY], rel=1e-12)


def test_an_eager_message_has_gone_ahead() -> None:
    def program(comm: Communicator) -> float:
        comm.advance(0.0 if comm.rank == 0 else 5.0)
        comm.send(np.zeros(100, np.uint8), 1) if comm.rank == 0 else comm.recv(
            np.zeros(100, np.uint8), 0
        )
        return comm.clock()

    slow = Cluster.uniform(1.0, 100.0)  # it takes 2 seconds, and has been there since
    assert run(program, 2, cluster=slow, eager_limit=100) == [0, 5]
    assert run(program, 2, cluster=slow, eager_limit=99) == [6, 7]


def test_a_parameter_server_takes_what_its_one_incoming_port_allows() -> None:
    for ranks in (2, 3, 8, 33):
        n = 1 << 20
        # one buffer: the next may leave when one has been added
        receive = (ranks - 1) * (n / BANDWIDTH + LATENCY)
        times = seconds(lambda comm, n=n: all_reduce(meta(n), comm, algorithm="central"), ranks)
        assert max(times) == pytest.approx(
            receive + (ranks - 1) * n / BANDWIDTH + LATENCY, rel=1e-9
        )
        assert min(times) >= receive


def test_an_outgoing_port_sends_one_message_after_the_other_and_both_directions_go_at_once() -> (
    None
):
    def program(comm: Communicator) -> None:
        peers = [rank for rank in range(comm.size) if rank != comm.rank]
        requests = [comm.isend(meta(1000), peer) for peer in peers] + [
            comm.irecv(meta(1000), peer) for peer in peers
        ]
        for request in requests:
            request.wait()

    def spread(comm: Communicator) -> None:
        if comm.rank:
            comm.recv(meta(1000), 0)
            return
        for request in [comm.isend(meta(1000), peer) for peer in range(1, comm.size)]:
            request.wait()

    cluster = Cluster.uniform(0, 1000)  # a second a message
    assert seconds(program, 4, cluster)[0] >= 3
    assert max(seconds(program, 2, cluster)) == 1
    assert seconds(spread, 4, cluster) == [3, 1, 2, 3]  # whose incoming ports are all free


def test_an_incoming_port_takes_one_message_after_the_other() -> None:
    def program(comm: Communicator) -> None:
        if comm.rank:
            comm.send(meta(1000), 0)
            return
        requests = [comm.irecv(meta(1000), rank) for rank in range(1, comm.size)]
        for number, request in enumerate(requests, start=1):
            request.wait()
            assert comm.clock() == number

    seconds(program, 4, Cluster.uniform(0, 1000))


def test_textbook_latencies() -> None:
    tiny = Cluster.uniform(1.0, 1e30)
    for ranks in (2, 4, 8, 16):
        buffer, steps = meta(ranks), ranks.bit_length() - 1
        for algorithm, expected in (
            ("ring", 2 * (ranks - 1)),
            ("recursive", steps),
            ("halving_doubling", 2 * steps),
            ("tree", 2 * steps),
            ("central", ranks),
        ):
            times = seconds(
                lambda comm, b=buffer, a=algorithm: all_reduce(b, comm, algorithm=a), ranks, tiny
            )
            assert max(times) == pytest.approx(expected), (algorithm, ranks)
        assert max(seconds(lambda comm: comm.barrier(), ranks, tiny)) == steps
        assert (
            max(seconds(lambda comm, b=buffer: broadcast(b, comm, algorithm="tree"), ranks, tiny))
            == steps
        )
        assert max(seconds(lambda comm, b=buffer: all_to_all(b, comm), ranks, tiny)) == ranks - 1


def test_hierarchies_pay_across_nodes() -> None:
    cluster, n = Cluster.h100(nodes=4), 1 << 28
    flat, levels, chosen = (
        max(seconds(lambda comm, a=algorithm: all_reduce(meta(n), comm, algorithm=a), 32, cluster))
        for algorithm in ("ring", "hierarchical", "auto")
    )
    assert levels < 0.5 * flat and chosen == levels
    inside = 2 * 7 * (3e-6 + n / 8 / 450e9)
    across = 2 * 3 * (10e-6 + n / 8 / 4 / 50e9)
    assert levels == pytest.approx(inside + across, rel=1e-9)


def test_clusters_have_the_bandwidths_they_promise() -> None:
    for cluster, inside, across in (
        (Cluster.h100(2), 450e9, 50e9),
        (Cluster.a100(2), 300e9, 25e9),
        (Cluster.p4d(2), 300e9, 6.25e9),
    ):
        assert (cluster.link(0, 7).bandwidth, cluster.link(7, 8).bandwidth) == (inside, across)
        assert cluster.capacity() == 16
    assert Cluster.ethernet(2).link(0, 1).bandwidth == 1.25e9
    with pytest.raises(ValueError, match="bandwidth=0"):
        Link(0, 0)
    with pytest.raises(ValueError, match=r"latency=-1"):
        Cluster.uniform(-1, 5)


def test_advance_is_computing_and_never_runs_backwards() -> None:
    def program(comm: Communicator) -> None:
        comm.advance(2.5)
        with pytest.raises(ValueError, match="time does not run backwards"):
            comm.advance(-1)

    assert seconds(program, 2) == [2.5, 2.5]


def test_without_a_cluster_time_is_the_machines() -> None:
    def program(comm: Communicator) -> float:
        before = comm.clock()
        comm.advance(1000)
        time.sleep(0.01)
        return comm.clock() - before

    assert all(0.01 <= elapsed < 5 for elapsed in run(program, 2))


def test_reading_a_peers_memory_takes_time_too() -> None:
    def program(comm: Communicator) -> None:
        buffer = comm.allocate(1 << 20, np.uint8)
        all_reduce(buffer, comm, algorithm="shared")

    reads_and_writes = 2 * (1 << 20) / 2 / BANDWIDTH + LATENCY
    assert max(seconds(program, 2)) == pytest.approx(2 * LATENCY + reads_and_writes, rel=1e-9)


def noisy(comm: Communicator, noise: random.Random) -> list[float]:
    """Do a bit of everything, with the threads of this machine disturbed; return the clock at every
    step.
    """

    def disturb() -> None:
        if noise.random() < 0.1:
            time.sleep(noise.random() * 1e-3)

    times, peer = [], comm.rank ^ 1
    stream = comm.stream()
    handles = []
    for step in range(6):
        disturb()
        comm.advance(1e-6 * (comm.rank + 1))
        handles.append(
            stream.launch(lambda s=step: (disturb(), all_reduce(meta(1000 * (s + 1)), stream.comm)))
        )
        disturb()
        receive = comm.irecv(meta(5000), peer, tag=step)
        polls = 0
        if comm.rank % 2:
            comm.advance(2e-6)
            disturb()
        send = comm.isend(meta(5000), peer, tag=step)
        while not receive.test():  # a program that sees how often it had to ask
            comm.advance(3e-6)
            polls += 1
            disturb()
        times += [comm.clock(), float(polls)]
        others = [
            comm.irecv(meta(100), rank, tag=100) for rank in range(comm.size) if rank != comm.rank
        ]
        out = [
            comm.isend(meta(100), rank, tag=100) for rank in range(comm.size) if rank != comm.rank
        ]
        while others:
            others = [request for request in others if not request.test()]
            comm.advance(1e-6)
            disturb()
        for request in [send, *out]:
            request.wait()
        all_reduce(meta(10_000), comm, algorithm=("ring", "tree", "central")[step % 3])
        times.append(comm.clock())
    for handle in handles:
        handle.wait()
        times.append(comm.clock())
    return times


def test_virtual_times_do_not_depend_on_which_thread_was_faster() -> None:
    cluster = Cluster(Link(1e-6, 1e9), Link(5e-6, 1e8), ranks_per_node=2)
    first = None
    for attempt in range(20):
        times = run(
            lambda comm, a=attempt: noisy(comm, random.Random(100 * a + comm.rank)),
            4,
            cluster=cluster,
        )
        first = first or times
        assert times == first, f"run {attempt} took other times than the first"


def test_what_a_poller_hears_does_not_depend_on_who_wakes_first() -> None:
    """All poll in vain, so all hear "not yet"; only then the first of them sends."""

    def program(comm: Communicator) -> tuple[bool, int]:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        receive = comm.irecv(meta(0), left)
        first, polls = receive.test(), 1
        send = comm.isend(meta(0), right)
        while not receive.test():
            polls += 1
        send.wait()
        return first, polls

    for _ in range(30):
        assert run(program, 8, cluster=Cluster.uniform(0, 1)) == [(False, 1)] * 8


def test_64_ranks_reduce_a_gibibyte_quickly() -> None:
    started = time.process_time()
    times = seconds(lambda comm: all_reduce(meta(1 << 30), comm, algorithm="ring"), 64)
    assert time.process_time() - started < 2
    assert times[0] == pytest.approx(2 * 63 * (LATENCY + 2**30 / 64 / BANDWIDTH), rel=1e-12, abs=0)
