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

from minidist.full.comm.threads_wire import threads_wire

# Tests share what others have
sys.path += [str(folder) for folder in FOLDERS if str(folder) not in sys.path]

# The files that take longest, in seconds of a core: begun last, one would run alone.
LONGEST = {
    "test_lessons.py": 100,
    "test_site.py": 45,
    "test_notebooks.py": 35,
    "test_grade_attacks.py": 32,
    "test_grade.py": 27,
    "test_second_opinion.py": 27,
    "test_restarts.py": 22,
    "test_resume_mesh.py": 21,
    "test_bench.py": 21,
    "test_parallelize.py": 20,
    "test_train_mesh.py": 19,
    "test_elastic.py": 17,
    "test_stages.py": 16,
    "test_train.py": 15,
    "test_train_memory.py": 14,
    "test_launch.py": 14,
    "test_adapters.py": 12,
    "test_mpi.py": 12,
    "test_compiled.py": 11,
    "test_course.py": 11,
    "test_faults_mpi.py": 11,
    "test_offloaded_stages.py": 9,
    "test_context_parallel.py": 9,
    "test_store.py": 9,
    "test_faults_train.py": 8,
    "test_torch_suite.py": 9,
    "test_pipeline.py": 8,
    "test_export.py": 8,
    "test_answer.py": 8,
    "test_evaluation.py": 8,
    "test_recompute.py": 8,
    "test_your_loop.py": 8,
    "test_axes.py": 8,
    "test_segment.py": 8,
    "test_house.py": 7,
    "test_replace.py": 7,
    "test_planner.py": 7,
    "test_fsdp.py": 7,
    "test_torch_wire.py": 7,
    "test_expert_parallel.py": 7,
    "test_schedules.py": 7,
    "test_package.py": 7,
    "test_player.py": 6,
    "test_c10d_calls.py": 6,
    "test_tensor_parallel.py": 6,
    "test_collectives.py": 6,
    "test_torch_plans.py": 6,
    "test_c10d_pipelines.py": 6,
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
