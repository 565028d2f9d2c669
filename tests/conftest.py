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

from minidist.comm.threads_wire import threads

# Tests share what others have
sys.path += [str(folder) for folder in FOLDERS if str(folder) not in sys.path]

# The files that take longest, in seconds: begun last, one would run alone, and leave a core idle.
LONGEST = {
    "test_lessons.py": 160,
    "test_notebooks.py": 81,
    "test_mpi.py": 49,
    "test_grade_attacks.py": 39,
    "test_train_memory.py": 34,
    "test_compiled.py": 31,
    "test_bench.py": 30,
    "test_second_opinion.py": 28,
    "test_resume_mesh.py": 22,
    "test_stages.py": 21,
    "test_parallelize.py": 21,
    "test_faults_mpi.py": 20,
    "test_grade.py": 20,
    "test_expert_parallel.py": 19,
    "test_random_layouts.py": 19,
    "test_train_mesh.py": 19,
    "test_launch.py": 19,
    "test_faults_train.py": 18,
    "test_context_parallel.py": 18,
    "test_course.py": 17,
    "test_lifetimes.py": 15,
    "test_evaluation.py": 15,
    "test_segment.py": 15,
    "test_kills_mesh.py": 14,
    "test_your_loop.py": 14,
    "test_export.py": 14,
    "test_schedules.py": 14,
    "test_house.py": 14,
    "test_collectives.py": 13,
    "test_recompute.py": 13,
    "test_answer.py": 13,
    "test_odd_values.py": 13,
    "test_player.py": 12,
    "test_data_parallel_mpi.py": 12,
    "test_here.py": 11,
    "test_train.py": 11,
    "test_pipeline.py": 10,
    "test_store.py": 9,
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
    run_rank = threads._run_rank

    def pinned(*args: Any) -> None:
        os.sched_setaffinity(0, CORE)  # of this thread and those that it starts
        run_rank(*args)

    with pytest.MonkeyPatch.context() as patch:
        if LIBC is not None:
            patch.setattr(threads, "_run_rank", pinned)
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
