"""Forks and streams on simulated ranks: first in, first out, beside the main thread."""

from __future__ import annotations

import functools
import threading
import time

import numpy as np
import pytest

from minidist import Cluster, Communicator, DeadlockError, run
from minidist.full.comm import CommunicationError, RankFailed


def test_a_stream_runs_its_work_in_order_and_hands_back_results() -> None:
    def program(comm: Communicator) -> list[int]:
        stream, ran = comm.stream(), []

        def work(number: int) -> int:
            time.sleep(0.001 * (number % 3))
            ran.append(number)
            return number * number

        handles = [stream.launch(work, number) for number in range(10)]
        results = [handle.wait() for handle in reversed(handles)]
        assert ran == list(range(10))
        assert handles[3].wait() == 9 and handles[3].result == 9, "a handle may be waited for again"
        return results

    assert run(program, 2) == [[number * number for number in reversed(range(10))]] * 2


def test_any_callable_can_be_launched() -> None:
    def program(comm: Communicator) -> int:
        handle = comm.stream().launch(functools.partial(max, key=lambda number: -number), 3, 4)
        return int(handle.wait())

    assert run(program, 2) == [3, 3]


def test_streams_of_one_rank_do_not_wait_for_each_other() -> None:
    def program(comm: Communicator) -> None:
        first, second = comm.stream(), comm.stream()
        gate, peer = np.zeros(1), 1 - comm.rank
        stuck = first.launch(first.comm.recv, gate, peer)
        second.launch(second.comm.exchange, np.ones(1), peer, np.zeros(1), peer).wait()
        first.comm.isend(np.ones(1), peer)
        stuck.wait()
        assert gate[0] == 1

    run(program, 2)


def test_a_stream_that_uses_its_launchers_communicator_is_told_so() -> None:
    def program(comm: Communicator) -> None:
        comm.stream().launch(comm.recv, np.zeros(1), 1 - comm.rank, 1)
        comm.recv(np.zeros(1), 1 - comm.rank, 2)

    with pytest.raises(
        CommunicationError, match=r"two threads of rank . wait on one communicator .* stream\.comm"
    ):
        run(program, 2)


def test_an_error_of_the_work_reaches_wait_and_ends_the_run() -> None:
    seen = []

    def program(comm: Communicator) -> None:
        def fails() -> None:
            raise KeyError("no such bucket")

        handle = comm.stream().launch(fails if comm.rank == 1 else lambda: None)
        try:
            handle.wait()
            comm.barrier()
        except BaseException as error:
            seen.append((comm.rank, type(error)))
            raise

    for _ in range(20):  # whichever thread is faster
        seen.clear()
        with pytest.raises(KeyError, match="no such bucket") as caught:
            run(program, 2)
        assert "[rank 1]" in caught.value.__notes__[0]
        assert sorted(seen) == [(0, RankFailed), (1, KeyError)]


def test_the_waiter_hears_the_works_own_error_however_late_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from minidist.full.comm.threads_wire.threads_wire import ThreadsWire

    fail = ThreadsWire.fail
    monkeypatch.setattr(
        ThreadsWire, "fail", lambda wire, error: (fail(wire, error), time.sleep(0.1))
    )

    heard = []

    def program(comm: Communicator) -> None:
        try:
            comm.stream().launch(lambda: 1 / 0).wait()
        except BaseException as error:
            heard.append(type(error))

    with pytest.raises(ZeroDivisionError):
        run(program, 1)
    assert heard == [ZeroDivisionError]


def test_an_error_that_nobody_waits_for_ends_the_run_too() -> None:
    def program(comm: Communicator) -> None:
        stream = comm.stream()
        if comm.rank == 1:
            stream.launch(lambda: 1 / 0)
        comm.recv(np.zeros(1), 1 - comm.rank)

    with pytest.raises(ZeroDivisionError):
        run(program, 2)


def test_a_fork_may_be_used_by_the_same_thread() -> None:
    def program(comm: Communicator) -> None:
        fork = comm.fork()
        fork.exchange(np.ones(1), 1 - comm.rank, np.zeros(1), 1 - comm.rank)
        comm.barrier()
        fork.barrier()

    run(program, 2)


def test_a_fork_that_nobody_uses_does_not_hide_a_deadlock() -> None:
    def program(comm: Communicator) -> None:
        comm.fork()
        comm.stream()
        if comm.rank == 0:
            comm.recv(np.zeros(1), 1)

    with pytest.raises(DeadlockError, match="rank 0 waits for rank 1, which has finished"):
        run(program, 2)


def test_a_stream_that_outlives_its_run_without_work_is_no_deadlock() -> None:
    assert len(run(lambda comm: comm.stream(), 2)) == 2


def test_a_deadlock_on_forks_that_the_main_threads_use_is_found() -> None:
    def program(comm: Communicator) -> None:
        comm.fork().recv(np.zeros(1), 1 - comm.rank)

    with pytest.raises(DeadlockError):
        run(program, 2)


def test_a_users_thread_that_is_late_is_no_deadlock() -> None:
    def program(comm: Communicator) -> float:
        fork, received = comm.fork(), np.zeros(1)
        if comm.rank == 1:
            fork.recv(received, 0)
            comm.send(received, 0)
            return 0.0

        def help_later() -> None:
            time.sleep(0.3)
            fork.send(np.full(1, 7.0), 1)

        helper = threading.Thread(target=help_later)
        helper.start()
        comm.recv(received, 1)
        helper.join()
        return float(received[0])

    assert run(program, 2) == [7, 0]


def test_a_deadlock_left_behind_by_a_users_thread_is_found() -> None:
    def program(comm: Communicator) -> None:
        fork = comm.fork()
        helper = threading.Thread(target=lambda: (fork.barrier(), time.sleep(0.1)))
        helper.start()
        comm.recv(np.zeros(1), 1 - comm.rank)

    with pytest.raises(DeadlockError):
        run(program, 2)


def test_waiting_for_a_stream_whose_work_cannot_finish_is_a_deadlock() -> None:
    def program(comm: Communicator) -> None:
        stream = comm.stream()
        handle = stream.launch(stream.comm.recv, np.zeros(1), 1 - comm.rank)
        if comm.rank == 0:
            handle.wait()

    with pytest.raises(DeadlockError) as caught:
        run(program, 2)
    assert "rank 0 waits: the stream's recv at test_streams.py" in str(caught.value)
    assert "receive from rank 1" in str(caught.value)


def test_work_that_waits_for_later_work_of_its_own_stream_ends_the_run() -> None:
    def program(comm: Communicator) -> None:
        stream = comm.stream()
        stream.launch(lambda: stream.launch(lambda: 3).wait()).wait()

    with pytest.raises(
        CommunicationError, match=r"the stream's <lambda>|two threads of rank 0 wait"
    ):
        run(program, 1)


def test_a_stream_starts_at_the_later_of_its_own_time_and_its_launchers() -> None:
    def program(comm: Communicator) -> tuple[float, ...]:
        stream = comm.stream()
        started = []

        def work(seconds: float) -> None:
            started.append(stream.comm.clock())
            stream.comm.advance(seconds)

        comm.advance(1)
        first = stream.launch(work, 5.0)  # from 1 to 6
        comm.advance(2)
        second = stream.launch(work, 1.0)  # launched at 3, from 6 to 7
        comm.advance(1)
        first.wait()
        at_first = comm.clock()
        second.wait()
        at_second = comm.clock()
        comm.advance(3)
        stream.launch(work, 1.0).wait()  # from 10 to 11: the stream was idle
        second.wait()
        return (*started, at_first, at_second, comm.clock())

    assert run(program, 2, cluster=Cluster.uniform(0, 1)) == [(1, 6, 10, 6, 7, 11)] * 2


def test_what_a_stream_does_meanwhile_is_not_counted_as_the_main_threads_communication() -> None:
    def program(comm: Communicator) -> tuple[float, int]:
        stream, peer = comm.stream(), 1 - comm.rank
        handle = stream.launch(stream.comm.exchange, np.zeros(1000), peer, np.zeros(1000), peer)
        comm.advance(10.0)
        handle.wait()
        return comm.traffic.seconds, comm.traffic.bytes

    assert run(program, 2, cluster=Cluster.uniform(1, 8000)) == [(0.0, 8000)] * 2
