"""When a simulated rank fails, all end: with that rank's error, and with no thread left."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from minidist import Cluster, Communicator, DeadlockError, run
from minidist.full.comm import RankFailed


@pytest.fixture(autouse=True)
def no_thread_stays_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 60
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"threads stayed behind: {left}"


@pytest.mark.parametrize(
    "error", (ValueError("bad luck"), SystemExit(3), StopIteration(1), MemoryError("no more"))
)
def test_the_original_error_is_raised_and_names_its_rank(error: BaseException) -> None:
    others = []

    def program(comm: Communicator) -> None:
        if comm.rank == 2:
            raise error
        try:
            comm.recv(np.zeros(1), 2)
        except RankFailed as stopped:
            others.append(str(stopped))
            raise

    with pytest.raises(type(error)) as caught:
        run(program, 4)
    assert caught.value is error
    assert any("[rank 2]" in note for note in error.__notes__)
    assert len(others) == 3 and all("rank 2 failed" in text for text in others)


@pytest.mark.parametrize(
    "waiting",
    ("send", "exchange", "barrier", "split", "all_gather_object", "poll", "stream", "allocate"),
)
def test_whatever_the_others_wait_for_they_stop(waiting: str) -> None:
    """Else `no_thread_stays_behind` finds them."""

    def program(comm: Communicator) -> None:
        stream = comm.stream()
        if comm.rank == 1:
            time.sleep(0.02)
            raise ValueError("bad luck")
        buffer = np.zeros(1)
        if waiting == "send":
            comm.send(buffer, 1)
        elif waiting == "exchange":
            comm.exchange(buffer, 1, np.zeros(1), 1)
        elif waiting == "barrier":
            comm.barrier()
        elif waiting == "split":
            comm.split(0)
        elif waiting == "all_gather_object":
            comm.all_gather_object(3)
        elif waiting == "poll":
            request = comm.irecv(buffer, 1)
            while not request.test():
                pass
        elif waiting == "stream":
            stream.launch(stream.comm.recv, buffer, 1).wait()
        else:
            comm.allocate(3, "f4")

    for cluster in (None, Cluster.uniform(1e-6, 1e9)):
        with pytest.raises(ValueError, match="bad luck"):
            run(program, 3, cluster=cluster)


def test_a_rank_that_swallows_its_neighbours_failure_cannot_go_on() -> None:
    def program(comm: Communicator) -> None:
        if comm.rank == 0:
            raise ValueError("bad luck")
        for _ in range(3):
            with pytest.raises(RankFailed):
                comm.send(np.zeros(1), 0)

    with pytest.raises(ValueError, match="bad luck"):
        run(program, 2)


def test_ranks_that_compute_get_a_second_to_stop_all_together() -> None:
    def program(comm: Communicator) -> None:
        if comm.rank == 0:
            raise ValueError("bad luck")
        time.sleep(5)

    started = time.monotonic()
    with pytest.raises(ValueError):
        run(program, 6)
    assert time.monotonic() - started < 4


def test_only_the_first_of_two_errors_counts() -> None:
    def program(comm: Communicator) -> None:
        time.sleep(0.05 * comm.rank)
        raise ValueError(f"error of rank {comm.rank}")

    with pytest.raises(ValueError, match="error of rank 0"):
        run(program, 3)


def test_a_deadlock_stops_streams_and_polling_ranks_as_well() -> None:
    def program(comm: Communicator) -> None:
        stream = comm.stream()
        stream.launch(stream.comm.recv, np.zeros(1), 1 - comm.rank)
        request = comm.irecv(np.zeros(1), 1 - comm.rank)
        while comm.rank == 0 and not request.test():
            pass
        request.wait()

    with pytest.raises(DeadlockError):
        run(program, 2)


PROGRAM = """
    import signal, sys, threading, time
    import numpy as np
    import minidist

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

    def program(comm):
        sys.stdout.write("started\\n")
        sys.stdout.flush()
        {body}

    def ranks():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank")]

    try:
        minidist.run(program, 3)
    except KeyboardInterrupt:
        deadline = time.monotonic() + 20
        while len(ranks()) > {left} and time.monotonic() < deadline:
            time.sleep(0.01)
        print("interrupted", *ranks(), flush=True)
        raise
"""


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (
            "comm.recv(np.zeros(1), (comm.rank + 1) % 3) if comm.rank else time.sleep(600)",
            " rank 0",
        ),
        ("time.sleep(600)", " rank 0 rank 1 rank 2"),
        ("while True: comm.barrier()", ""),
    ],
)
def test_an_interrupted_run_ends_at_once(body: str, left: str) -> None:
    """Threads that compute are left to the end of the process, which they delay by a second."""
    program = PROGRAM.format(body=body, left=left.count("rank"))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["started\n"] * 3
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert out == f"interrupted{left}\n"
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in error
