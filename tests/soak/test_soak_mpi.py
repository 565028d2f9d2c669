"""MPI ranks, at length: killed at random moments, interrupted in every way, given random work and
huge buffers.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from faults import Fault, Job, run_to_its_end, send
from ranks import TESTS, mpirun, torchrun
from test_lifetimes import WRAPS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

WORK = {
    "shared": "while True: all_reduce(np.ones(1000), comm)",
    "ring": "while True: all_reduce(np.ones(100_000), comm, algorithm='ring')",
    "native": "while True: all_reduce(np.ones(1000), comm, algorithm='native')",
    "stream": """
stream = comm.stream()
while True:
    handle = stream.launch(all_reduce, np.ones(5000), stream.comm)
    all_reduce(np.ones(1000), comm)
    handle.wait()
""",
    "compute": "while True: np.ones(100).sum()",
    "receive": "comm.recv(one(), (comm.rank + 1) % comm.size)",
}
STARTED = "print('started', flush=True)\n"


@pytest.mark.parametrize("attempt", range(60))
def test_killing_ranks_at_random_moments(attempt: int, tmp_path: Path) -> None:
    plan = random.Random(attempt)
    ranks, work = plan.randint(2, 6), plan.choice(list(WORK))

    def kill(job: Job) -> None:
        if plan.random() < 0.7:
            job.await_output("started", ranks)
        time.sleep(plan.random() * 1.0)
        victims = job.ranks()
        for victim in plan.sample(victims, min(len(victims), plan.choice([1, 1, 2]))):
            with suppress(ProcessLookupError):
                os.kill(victim, plan.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]))

    ended = run_to_its_end(
        Fault(STARTED + WORK[work], limit=20, ranks=ranks, meanwhile=kill), tmp_path
    )
    assert ended.status != 0 and ended.seconds < 28


@pytest.mark.parametrize("who", ("group", "mpirun"))
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
@pytest.mark.parametrize("work", WORK)
def test_interrupting_the_job_in_every_way(
    work: str, number: signal.Signals, who: str, tmp_path: Path
) -> None:
    fault = Fault(STARTED + WORK[work], limit=300, ranks=3, meanwhile=send(number, who, 3))
    ended = run_to_its_end(fault, tmp_path)
    assert ended.status != 0 and ended.seconds < 15


@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 5, 6, 7, 8))
def test_everything_again_and_again(ranks: int) -> None:
    for _ in range(5):
        outcome = mpirun(ranks, TESTS / "mpi_checks.py", timeout=120, python=[sys.executable])
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_thousands_of_random_collectives() -> None:
    program = """
        import random
        import numpy as np
        import minidist
        from collective_cases import CHECKS, REDUCING, Cell, available
        from minidist.full.collectives import all_reduce

        comm = minidist.init(limit=60)
        half, stream = comm.split(comm.rank % 2), comm.stream()
        plan = random.Random(5)  # the same on all ranks
        for step in range(3000):
            group = plan.choice([comm, half])
            operation, count = plan.choice(list(CHECKS)), plan.choice([0, 1, 7, 100, 5000, 200_000])
            choice = plan.random()
            names = available(operation, group)
            algorithm = names[int(choice * len(names))]
            beside = [stream.launch(all_reduce, np.ones(1000), stream.comm)] if choice < 0.2 else []
            dtype, op = plan.choice(["float32", "int64"]), "sum" if operation in REDUCING else ""
            CHECKS[operation](group, Cell(operation, algorithm, dtype, op), count, step)
            for handle in beside:
                handle.wait()
        print("done", flush=True)
    """
    for ranks in (2, 3, 4, 6):
        outcome = mpirun(ranks, program, timeout=900)
        assert outcome.returncode == 0 and outcome.stdout.count("done") == ranks, outcome.stderr


@pytest.mark.parametrize("way", ("send", "shared", "ring", "native", "registered"))
def test_buffers_beyond_two_gibibytes(way: str) -> None:
    program = f"""
        import sys
        import numpy as np
        import minidist
        from minidist.full.collectives import all_reduce

        way, comm = "{way}", minidist.init()
        size = (1 << 31) + (1 << 20) + 3
        buffer = comm.allocate(size, np.uint8) if way == "registered" else np.zeros(size, np.uint8)
        if comm.rank == 0:
            buffer[::4097] = 7
            buffer[-1] = 9
        if way == "send":
            comm.send(buffer, 1) if comm.rank == 0 else comm.recv(buffer, 0)
        else:
            all_reduce(buffer, comm, "max", "shared" if way == "registered" else way)
        assert buffer[-1] == 9 and (buffer[: size - 1 : 4097] == 7).all() and buffer[1:4097].max() == 0
        print("done", flush=True)
    """
    outcome = mpirun(2, program, timeout=300)
    assert outcome.returncode == 0 and outcome.stdout.count("done") == 2, outcome.stderr


@pytest.mark.parametrize("launch", [mpirun, torchrun])
def test_wrapping_and_dropping_a_model_two_thousand_times(
    launch: Callable[..., CompletedProcess[str]],
) -> None:
    outcome = launch(2, WRAPS, "2000", timeout=1700)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count("wrapped 2000 times") == 2
