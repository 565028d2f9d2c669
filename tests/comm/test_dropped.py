"""A request that a program drops: its message arrives whole, its buffer stays, and a warning says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from subprocess import CompletedProcess

import numpy as np
import pytest
from ranks import mpirun, torchrun

from minidist import Communicator, DeadlockError, run
from minidist.full.comm.request import Pending
from minidist.full.trace.events import RECEIVE

PROGRAM = """
import gc
import numpy as np
import minidist

comm = minidist.init(limit=20)
to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def others():
    gc.collect()
    return [np.full(2000, -1.0) for _ in range(8)]  # as long: they lie where freed arrays lay


for repetition in range(20):
    into = np.zeros(2000)
    comm.isend(np.full(2000, float(comm.rank)), to)
    junk = others()
    comm.recv(into, source)
    assert (into == source).all(), into[:3]
    comm.irecv(np.zeros(2000), source, tag=1)
    junk = others()
    comm.barrier()
    comm.send(into, to, tag=1)
    comm.barrier()
    assert all((each == -1).all() for each in junk)
"""


@pytest.mark.parametrize("launch", (mpirun, torchrun))
def test_a_dropped_request_keeps_its_buffer_and_says_so(
    launch: Callable[..., CompletedProcess[str]],
) -> None:
    outcome = launch(2, PROGRAM)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    for rank in (0, 1):
        drops = f"rank {rank} drops the request of a message under way"
        for kind, tag in (("send", 0), ("recv", 1)):
            end = f"({kind}, rank {1 - rank} at the other end, tag {tag}, 16000 bytes): keep it"
            assert f"{drops} {end}" in outcome.stderr


@pytest.mark.parametrize("engine", ("threads", "cooperative"))
def test_simulated_ranks_warn_of_messages_under_way_alone(engine: str) -> None:
    """Neither of those that are through, nor of those that a failed run leaves."""

    def program(comm: Communicator) -> float:
        into = np.zeros(3)
        if comm.rank == 0:
            comm.isend(np.full(3, 7.0), 1)
            message = comm.isend(np.ones(3), 1, tag=1)
            comm.barrier()
            message.wait()
        else:
            comm.barrier()
            comm.recv(into, 0)
            comm.recv(np.zeros(3), 0, tag=1)
        return float(into.sum())

    with pytest.warns(RuntimeWarning, match=r"rank 0 drops the request .* tag 0,") as told:
        assert run(program, 2, engine=engine) == [0.0, 21.0]
    assert len(told) == 1

    def fails(comm: Communicator) -> None:
        message = comm.isend(np.ones(3), 1 - comm.rank, tag=1)
        comm.recv(np.zeros(3), 1 - comm.rank)
        message.wait()

    with warnings.catch_warnings(action="error"), pytest.raises(DeadlockError):
        run(fails, 2, engine=engine)


class Broken:
    """A message whose other end is gone."""

    def wait(self) -> None:
        raise ConnectionError("gone")

    def test(self) -> bool:
        return False

    def drop(self) -> bool:
        return False


def test_a_request_whose_wait_has_raised_is_no_forgotten_one() -> None:
    def program(comm: Communicator) -> None:
        pending = Pending(comm, RECEIVE, np.zeros(1), 1 - comm.rank, 0, Broken())
        with pytest.raises(ConnectionError):
            pending.wait()
        del pending

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(program, 2)
    assert not seen
