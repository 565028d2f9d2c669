"""What holds for all tests."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import FOLDERS

from minidist.comm.threads_wire import threads_wire

# Tests share what others have
sys.path += [str(folder) for folder in FOLDERS if str(folder) not in sys.path]

# The files that take longest, in seconds: begun last, one would run alone, and leave a core idle.
LONGEST = {
    "test_lessons.py": 164,
    "test_notebooks.py": 65,
    "test_grade_attacks.py": 43,
    "test_parallelize.py": 36,
    "test_second_opinion.py": 33,
    "test_grade.py": 30,
    "test_bench.py": 25,
    "test_faults_mpi.py": 24,
    "test_launch.py": 22,
    "test_mpi.py": 21,
    "test_resume_mesh.py": 19,
    "test_train_mesh.py": 19,
    "test_train_memory.py": 18,
    "test_answer.py": 17,
    "test_faults_train.py": 13,
    "test_compiled.py": 13,
    "test_expert_parallel.py": 13,
    "test_kills_mesh.py": 11,
    "test_train.py": 11,
    "test_your_loop.py": 10,
    "test_course.py": 10,
    "test_context_parallel.py": 10,
    "test_player.py": 9,
    "test_collectives.py": 9,
    "test_pipeline.py": 9,
    "test_stages.py": 9,
    "test_export.py": 9,
    "test_planner.py": 9,
    "test_adapters.py": 9,
    "test_evaluation.py": 8,
    "test_recompute.py": 8,
    "test_fsdp_traps.py": 8,
    "test_limit.py": 8,
}

LIBC = ctypes.CDLL(None) if hasattr(os, "sched_setaffinity") else None
CORE: set[int] = {LIBC.sched_getcpu()} if LIBC else set()

# Whoever is started in the background ignores Ctrl-C, and so would every program that is tested:
# ours is to hear it.
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
    """Keep simulated ranks on one core, where they hand Python's lock over in half the time; mpirun
    has them all.

    It is the core on which the system has put the test itself: it knows which one is free.
    """
    run_rank = threads_wire._run_rank

    def pinned(*args: Any) -> None:
        os.sched_setaffinity(0, CORE)  # of this thread and those that it starts
        run_rank(*args)

    with pytest.MonkeyPatch.context() as patch:
        if LIBC is not None:
            patch.setattr(threads_wire, "_run_rank", pinned)
        yield


@pytest.fixture(autouse=True)
def this_core() -> None:
    """Find out on which core a test begins."""
    if LIBC is not None:
        CORE.clear()
        CORE.add(LIBC.sched_getcpu())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A run sets the number of threads as it likes; later tests must not notice."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
