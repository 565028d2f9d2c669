"""Ranks and messages: what arrives, what is counted, a proved deadlock, an error, the virtual clock."""

import operator
import time

import numpy as np
import pytest
import torch

from minidist.cluster import Cluster
from minidist.comm import Communicator, Stream
from minidist.ring import ring_all_reduce
from minidist.threads import DeadlockError, run


def test_messages_arrive_in_order_and_are_counted() -> None:
    def program(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            requests = [comm.isend(np.full(2, float(n)), 1, tag=n % 2) for n in range(4)]
            for request in requests:
                request.wait()
            assert (comm.traffic.messages, comm.traffic.bytes) == (4, 64)
            return []
        found = []
        for tag in (1, 0, 0, 1):  # each tag is a queue of its own
            into = torch.zeros(2, dtype=torch.float64)
            comm.recv(into, 0, tag)
            found.append(into[0].item())
        assert comm.traffic.messages == 0
        return found

    assert run(program, 2)[1] == [1, 0, 2, 3]


def test_a_deadlock_is_proved_with_each_ranks_line_and_the_cycle() -> None:
    def program(comm: Communicator) -> None:
        comm.recv(np.zeros(1), (comm.rank + 1) % comm.size)

    with pytest.raises(DeadlockError) as caught:
        run(program, 3)
    text = str(caught.value)
    assert "rank 2 waits: receive from rank 0 (tag 0, 8 bytes) at test_book_ranks.py:" in text
    assert "in program" in text
    assert "0 -> 1 -> 2 -> 0" in text


def test_waiting_for_a_rank_that_has_ended_is_a_deadlock() -> None:
    def program(comm: Communicator) -> None:
        if comm.rank:
            comm.recv(np.zeros(1), 0)

    with pytest.raises(DeadlockError, match="rank 0 has ended"):
        run(program, 3)


def test_a_deadlock_of_streams_is_proved_while_their_ranks_wait_for_them() -> None:
    def program(comm: Communicator) -> None:
        stream = Stream(comm)
        stream.launch(stream.comm.barrier)  # This one ends.
        stream.launch(stream.comm.recv, np.zeros(1), 1 - comm.rank)
        stream.wait()

    with pytest.raises(DeadlockError) as caught:
        run(program, 2)
    text = str(caught.value)
    assert "rank 0 waits: end of a job on its stream at test_book_ranks.py:" in text
    assert "rank 1 waits: receive from rank 0 (tag 0, 8 bytes)" in text
    assert "0 -> 1 -> 0" in text


@pytest.mark.parametrize("queued", [0, 1, 2])
def test_jobs_that_are_queued_behind_another_hide_no_deadlock(queued: int) -> None:
    def program(comm: Communicator) -> None:
        if comm.rank == 0:
            stream = Stream(comm)
            for _ in range(1 + queued):
                stream.launch(stream.comm.recv, np.zeros(1), 1)
            stream.wait()
        else:
            comm.fork()

    with pytest.raises(DeadlockError, match="rank 1 has ended"):
        run(program, 2)


def test_streams_that_go_on_are_no_deadlock() -> None:
    def program(comm: Communicator) -> float:
        streams, total = [Stream(comm), Stream(comm)], np.ones(3)
        for step in range(50):
            for stream in streams:
                other = np.ones(3)
                chunks = np.array_split(other, comm.size)
                stream.launch(ring_all_reduce, chunks, stream.comm, operator.iadd)
            if step % 7 == comm.rank:
                streams[0].wait()
            ring_all_reduce(np.array_split(total, comm.size), comm, operator.iadd)
            total /= comm.size
        for stream in streams:
            stream.wait()
        return float(total.sum() + other.sum())

    assert run(program, 3) == [3 + 9] * 3


def test_an_error_on_a_stream_is_raised_by_wait_and_ends_all() -> None:
    def program(comm: Communicator) -> None:
        stream = Stream(comm)
        stream.launch(stream.comm.send, np.zeros(1), comm.rank)  # to itself
        stream.wait()

    with pytest.raises(ValueError, match="use another rank"):
        run(program, 2)


def test_a_send_waits_for_its_receive_unless_it_is_small_enough() -> None:
    def both_send_first(comm: Communicator) -> float:
        other, into = 1 - comm.rank, np.zeros(1)
        comm.send(np.full(1, comm.rank + 1.0), other)
        comm.recv(into, other)
        return float(into[0])

    with pytest.raises(DeadlockError):
        run(both_send_first, 2)
    assert run(both_send_first, 2, eager_limit=8) == [2, 1]


def test_an_error_on_one_rank_ends_all_and_names_it() -> None:
    def program(comm: Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("gone")
        comm.barrier()

    with pytest.raises(KeyError) as caught:
        run(program, 3)
    assert caught.value.__notes__ == ["on rank 1 of 3"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda comm: comm.send(np.zeros(1), 5), "to=5 on rank 0 of 2"),
        (lambda comm: comm.send(np.zeros(1), comm.rank), "use another rank"),
        (lambda comm: comm.send(np.zeros((4, 4))[:, 0], 1 - comm.rank), "not contiguous"),
    ],
)
def test_a_wrong_call_is_named(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(call, 2)  # type: ignore[arg-type]


def test_the_two_ends_must_have_the_same_bytes() -> None:
    def program(comm: Communicator) -> None:
        buffer = np.zeros(comm.rank + 1)
        comm.send(buffer, 1) if comm.rank == 0 else comm.recv(buffer, 0)

    with pytest.raises(ValueError, match="8 bytes, but the buffer has 16"):
        run(program, 2)


def test_split_orders_by_key_and_groups_do_not_mix() -> None:
    def program(comm: Communicator) -> tuple[int, int, float]:
        group = comm.split(comm.rank % 2, key=-comm.rank)
        total = np.full(4, float(comm.rank))
        ring_all_reduce(np.array_split(total, group.size), group, operator.iadd)
        return group.rank, group.size, float(total[0])

    assert run(program, 5) == [(2, 3, 6), (1, 2, 4), (1, 3, 6), (0, 2, 4), (0, 3, 6)]


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_a_ring_takes_the_time_of_the_formula(ranks: int) -> None:
    elements, bandwidth, latency = ranks << 20, 50e9, 1e-5

    def program(comm: Communicator) -> float:
        tensor = torch.empty(elements, device="meta")
        ring_all_reduce(tensor.tensor_split(comm.size), comm, operator.iadd)
        return comm.clock()

    times = run(program, ranks, cluster=Cluster.equal(bandwidth, latency))
    formula = 2 * (ranks - 1) * (latency + 4 * elements / (ranks * bandwidth))
    assert times == pytest.approx([formula] * ranks, rel=1e-12)


def test_a_group_of_all_ranks_has_the_same_clock() -> None:
    def program(comm: Communicator) -> float:
        group = comm.split(0)
        before = comm.clock()
        group.exchange(np.zeros(1000), 1 - comm.rank, np.zeros(1000), 1 - comm.rank)
        return comm.clock() - before

    times = run(program, 2, cluster=Cluster.equal(bandwidth=1e9, latency=1e-6))
    assert times == pytest.approx([9e-6] * 2)


def test_a_stream_hides_messages_behind_computing() -> None:
    def program(comm: Communicator, overlapped: bool) -> float:
        tensor = torch.empty(1 << 20, device="meta")
        stream = Stream(comm)

        def send() -> None:
            ring_all_reduce(tensor.tensor_split(comm.size), stream.comm, operator.iadd)

        stream.launch(send)
        if not overlapped:
            stream.wait()
        comm.advance(1e-3)
        stream.wait()
        return comm.clock()

    cluster = Cluster.equal(50e9, 1e-5)
    message = 2 * (1e-5 + (2 << 20) / 50e9)
    assert run(program, 2, True, cluster=cluster)[0] == pytest.approx(1e-3)
    assert run(program, 2, False, cluster=cluster)[0] == pytest.approx(1e-3 + message)


@pytest.mark.parametrize("late", ["rank", "stream"])
def test_the_clock_does_not_tell_which_thread_of_a_rank_was_faster(late: str) -> None:
    def program(comm: Communicator) -> tuple[float, float]:
        stream = Stream(comm)

        def swap(name: str, group: Communicator, size: int) -> None:
            time.sleep(0.2 * (name == late))
            group.exchange(np.zeros(size), 1 - comm.rank, np.zeros(size), 1 - comm.rank)

        stream.launch(swap, "stream", stream.comm, 1000)
        swap("rank", comm, 10)
        own = comm.clock()
        stream.wait()
        return own, comm.clock()

    times = run(program, 2, cluster=Cluster.equal(bandwidth=8.0, latency=1.0))
    assert times == [(11.0, 1001.0)] * 2
