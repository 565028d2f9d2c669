"""Floor 1 and 2 on real MPI ranks; what is checked stands in `mpi_checks.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ranks import TESTS, clean_environment, mpirun

CHECKS = TESTS / "mpi_checks.py"


@pytest.mark.parametrize(
    "ranks", (1, 2, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (3, 4)))
)
def test_everything_works_on_mpi_ranks(ranks: int) -> None:
    """Three and four are in the long run: the test below has three, and all of these steps; eight
    are below it, and four on threads.
    """
    outcome = mpirun(ranks, CHECKS, python=[sys.executable])
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count("is done") == ranks and outcome.stderr == ""


def test_everything_works_with_tensors_too() -> None:
    """On three ranks all cells of the table of collectives are tried, bfloat16 among them."""
    outcome = mpirun(3, CHECKS, "torch", timeout=110)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count("is done") == 3


def test_more_ranks_than_cores_take_turns() -> None:
    """Ranks that spin for one another must let each other run: a second would be a thousand times
    too slow.
    """
    outcome = mpirun(
        8,
        """
        import time
        import numpy as np
        import minidist
        from minidist.full.collectives import all_reduce

        comm = minidist.init()
        registered = comm.allocate(1000, np.float32)
        all_reduce(registered, comm)
        comm.barrier()
        started = time.perf_counter()
        for size in (1, 1000, 100_000):
            for algorithm in ("shared", "ring", "recursive"):
                buffer = np.full(size, comm.rank, np.float32)
                all_reduce(buffer, comm, algorithm=algorithm)
                assert (buffer == 28).all()
        for repetition in range(20):
            registered[:] = comm.rank
            all_reduce(registered, comm)
            assert (registered == 28).all()
        print(f"rank {comm.rank}: {time.perf_counter() - started:.3f}", flush=True)
        """,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count("rank") == 8


def test_the_mpirun_of_another_mpi_is_recognised() -> None:
    another = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import minidist; minidist.init()"],
        env=clean_environment() | another,
        capture_output=True,
        text=True,
    )
    assert outcome.returncode != 0
    assert "mpirun started 4 processes, but this Python speaks" in outcome.stderr
    assert "python -m minidist launch -n 4" in outcome.stderr


def test_an_mpi_program_needs_no_torch_and_starts_quickly() -> None:
    program = """
        import sys
        import minidist
        import minidist.full.collectives
        assert minidist.init().size == 2
        assert "torch" not in sys.modules
    """
    outcome = mpirun(2, program, python=[sys.executable])
    assert outcome.returncode == 0, outcome.stderr
