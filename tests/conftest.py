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

# Whoever is started in the background ignores Ctrl-C, and so would every program that is tested: ours is to hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
