"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import FOLDERS

from minidist.comm.threads_wire import threads

# Tests share what others have
sys.path += [str(folder) for folder in FOLDERS if str(folder) not in sys.path]

# The files that take longest, in seconds: begun last, one would run alone, and leave a core idle.
LONGEST = {
    "test_lessons.py": 150,
    "test_grade_attacks.py": 60,
    "test_bench.py": 45,
    "test_grade.py": 40,
    "test_notebooks.py": 40,
    "test_parallelize.py": 38,
    "test_train_mesh.py": 36,
    "test_resume_mesh.py": 34,
    "test_faults_mpi.py": 32,
    "test_train_memory.py": 30,
    "test_launch.py": 27,
    "test_kills_mesh.py": 26,
    "test_pipeline.py": 24,
    "test_faults_train.py": 24,
    "test_course.py": 20,
    "test_torch_wire.py": 20,
    "test_stages.py": 16,
    "test_random_layouts.py": 14,
    "test_collectives.py": 14,
    "test_fsdp_traps.py": 13,
    "test_player.py": 12,
    "test_data_parallel_mpi.py": 11,
    "test_sbatch.py": 10,
    "test_lifetimes.py": 10,
}

# Whoever is started in the background ignores Ctrl-C, and so would every program that is tested: ours is to hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Leave files in the order below: by itself, pytest-xdist begins with those of most tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; each is run by one worker."""
    items.sort(key=lambda item: -LONGEST.get(item.path.name, 0))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays: torch, and some thousand tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_core() -> Iterator[None]:
    """Keep simulated ranks on one core, where they hand Python's lock over in half the time; mpirun has them all."""
    run_rank = threads._run_rank
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])  # of pytest-xdist: each has a core of its own

    def pinned(*args: Any) -> None:
        os.sched_setaffinity(0, {cores[worker % len(cores)]})  # of this thread and those that it starts
        run_rank(*args)

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(os, "sched_getaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            patch.setattr(threads, "_run_rank", pinned)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A run sets the number of threads as it likes; later tests must not notice."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
