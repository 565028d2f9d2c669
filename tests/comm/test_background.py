"""A program is interrupted while a thread of it works: what has begun is finished, and nothing else
is begun.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from ranks import clean_environment, warm_python

THREADS = {
    "a rank": "run(Work(), 1)",
    "a stream": "stream = init().stream(); stream.launch(Work()); stream.launch(Work())",
    "reading ahead": "from minidist.full.trainer.batches import ReadAhead; batches = ReadAhead(Work())",
}
PROGRAM = """
import atexit, os, signal, sys, threading, time
from minidist import init, run

ending = threading.Event()
atexit.register(ending.set)  # after the package's own handler: called right before it

class Work:
    begun = False
    def __call__(self, *comm):
        self.begun = True
        print("begun", flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        ending.wait(0.4)
        time.sleep({seconds})
        print("finished", flush=True)
        return "a batch"
    def __iter__(self):
        return iter(self, None)
    def state_dict(self):
        return {{}}
    def __del__(self, sleep=time.sleep):
        if self.begun:
            sleep(0.1)
            print("freed", flush=True)

try:
    {start}
    while True:
        time.sleep(0.05)  # a signal that another thread has received ends no sleep
except KeyboardInterrupt:
    sys.exit(130)
"""


def interrupted(start: str, seconds: float) -> str:
    """Return what the program prints."""
    command = [sys.executable, "-c", PROGRAM.format(start=start, seconds=seconds)]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 130, done.stderr
    return done.stdout


@pytest.mark.parametrize("start", THREADS.values(), ids=THREADS)
def test_what_a_thread_has_begun_is_finished(start: str) -> None:
    printed = interrupted(start, 0.3)
    assert printed.startswith("begun\nfinished\n") and printed.count("begun") == 1


def test_what_was_worked_on_is_freed_by_then() -> None:
    """To free a tensor is to be inside a library as well."""
    assert interrupted(THREADS["a stream"], 0.3) == "begun\nfinished\nfreed\n"


def test_work_without_an_end_keeps_no_program_alive() -> None:
    assert interrupted(THREADS["a stream"], 60) == "begun\n"


LEAVING = """
import threading, time
from minidist.full.comm.job.background import BackgroundThread

class Group:
    def __del__(self, sleep=time.sleep):
        sleep(0.4)  # torch's waits for threads of its own, without Python's lock
        print("freed", flush=True)

done = threading.Event()
BackgroundThread(lambda group: done.wait(), Group(), name="the last to hold a group").start()
done.set()
time.sleep(0.1)
"""


def test_a_thread_that_leaves_frees_what_it_was_called_with_before_python_ends() -> None:
    command = [sys.executable, "-c", LEAVING]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "freed\n", "")


COMPUTING = """
import time
import torch
from minidist import run

def program(comm):
    if comm.rank == 0:
        time.sleep(0.1)
        raise ValueError("bad luck")
    weights = torch.ones(50, 50, requires_grad=True)
    while True:
        (weights @ weights).sum().backward()

run(program, 2)
"""


def test_a_rank_that_computes_on_after_another_has_failed_does_not_abort_the_program() -> None:
    """It comes back from torch after Python has ended, unless it is interrupted: the exit status
    would be a signal's, and the last line no sentence of ours.
    """
    command = [*warm_python(), "-c", COMPUTING]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "terminate called" not in done.stderr, done.stderr
    assert "ValueError: bad luck\n[rank 0] raised this" in done.stderr
