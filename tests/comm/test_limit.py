"""Simulated ranks, too, wait for one another no longer than a limit; computing may take as long as
it likes.
"""

from __future__ import annotations

import re
import threading
import time
import warnings

import numpy as np
import pytest

from minidist import Cluster, Communicator, run
from minidist.full.collectives import all_reduce
from minidist.full.comm import LaunchError, LimitError

ON_BOTH_CLOCKS = pytest.mark.parametrize(
    "cluster", (None, Cluster.uniform(1e-6, 1e9)), ids=("machine's", "virtual")
)


def sleeper(comm: Communicator) -> None:
    """Rank 1 sleeps; 0 waits on a stream, 2 polls, 3 has finished."""
    buffer, stream = np.ones(1), comm.stream()
    if comm.rank == 1:
        time.sleep(30)  # here
    elif comm.rank == 0:
        stream.launch(all_reduce, buffer, stream.comm, "sum", "ring").wait()
    elif comm.rank == 2:
        request = comm.irecv(buffer, 1)
        while not request.test():
            pass


@ON_BOTH_CLOCKS
def test_a_rank_that_sleeps_is_named_with_those_who_wait_for_it(cluster: Cluster | None) -> None:
    started = time.monotonic()
    with pytest.raises(LimitError) as caught:
        run(sleeper, 4, cluster=cluster, limit=0.6)
    assert time.monotonic() - started < 29, "it waits for no sleeper"
    said = str(caught.value)
    for pattern in (
        r"^rank \d has waited \d\.\d s, longer than one operation may \(limit 0\.6 s\)\. Who waits for whom:$",
        r"^  rank 0 waits \d\.\d s: the stream's all_reduce at test_limit\.py:\d+ in sleeper$",
        r"^  rank 0\+1 waits \d\.\d s: \S+ \w+ rank \d \(inside a collective, \d+ bytes\) in all_reduce$",
        r"^  rank 1 computes at test_limit\.py:(\d+) in sleeper$",
        r"^  rank 2 waits \d\.\d s: receive from rank 1 \(tag 0, 8 bytes\) at test_limit\.py:\d+ in sleeper$",
        r"^  rank 3 has finished$",
    ):
        assert re.search(pattern, said, re.MULTILINE), said
    line = int(re.search(r"rank 1 computes at \S+:(\d+)", said)[1])  # type: ignore[index]
    assert open(__file__, encoding="utf-8").read().splitlines()[line - 1].endswith("# here")  # noqa: SIM115


@ON_BOTH_CLOCKS
def test_computing_longer_than_the_limit_is_no_fault(cluster: Cluster | None) -> None:
    """Each wait is short, all of them together are not; a rank's own stream may work as long as it
    likes.
    """

    def program(comm: Communicator) -> float:
        stream = comm.stream()
        for _ in range(4):
            time.sleep(0.3 * comm.rank)
            comm.barrier()
        time.sleep(1.2)  # now nobody waits, but the streams for work
        stream.launch(time.sleep, 1.2).wait()
        return comm.rank

    assert run(program, 2, cluster=cluster, limit=0.8) == [0, 1]


def test_the_limit_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDIST_LIMIT", "0.3")
    with pytest.raises(LimitError, match=r"limit 0\.3 s"):
        run(sleeper, 4)
    monkeypatch.setenv("MINIDIST_LIMIT", "soon")
    with pytest.raises(LaunchError, match="MINIDIST_LIMIT=soon must be a number"):
        run(sleeper, 4)
    with pytest.raises(LaunchError, match="limit=0 must be above 0"):
        run(sleeper, 4, limit=0)


@pytest.mark.parametrize("engine", ("threads", "cooperative"))
def test_a_rank_that_computes_does_not_outlive_its_job(engine: str) -> None:
    """Later jobs would meet what it changes in the process: it is ended, or named in a warning."""
    before = set(threading.enumerate())
    changed = []

    def computes(comm: Communicator) -> None:
        if comm.rank == 1:
            changed.append("on")
            try:
                while True:
                    sum(range(1000))
            finally:
                changed.append("off")
        comm.recv(np.ones(1), 1)

    with warnings.catch_warnings(action="error"), pytest.raises(LimitError):
        run(computes, 3, limit=0.3, engine=engine)
    assert changed == ["on", "off"] and before.issuperset(threading.enumerate())

    def sleeps(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(5)  # Python cannot interrupt it
        comm.recv(np.ones(1), 1)

    warning = r"at test_limit\.py:\d+ in sleeps: computes on although its job has ended"
    with pytest.warns(RuntimeWarning, match=warning), pytest.raises(LimitError):
        run(sleeps, 3, limit=0.3, engine=engine)
