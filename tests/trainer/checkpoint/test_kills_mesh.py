"""A rank of a pipeline that is killed under `mpirun`, at any moment, or interrupted, or broken, or
merely slow.

Of a killed one nothing is lost but the steps since the last save: see `kill_ranks.py`, which says
what is checked.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from kill_ranks import LAYOUTS, SIZES, STEPS, Job, killed_again_and_again
from training import PROGRAM, RUN, metrics, short_text, train_on

from minidist.full.checkpoint import restore
from minidist.full.checkpoint.store import complete

# In the fifth step, in the midst of a microbatch's backward, one rank does FAULT
FAULTY = """
import os, time
from minidist.full.pipeline import executor
from minidist.full.pipeline.actions import Kind
backward, calls = executor.DO[Kind.BACKWARD], [0]
def broken(self, *rest, **named):
    calls[0] += 1
    if calls[0] == 4 * 4 + 2 and os.environ["PMI_RANK"] == "1":
        FAULT
    backward(self, *rest, **named)
executor.DO[Kind.BACKWARD] = broken
"""


@pytest.mark.soak
def test_a_rank_is_killed(tmp_path: Path) -> None:
    kills, _ = killed_again_and_again(tmp_path, ranks=2, seed=0, count=1)
    assert kills == 1


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("ranks", "count"), [(2, 30), (4, 20)])
def test_ranks_killed_at_fifty_moments(ranks: int, count: int, tmp_path: Path) -> None:
    kills, while_writing = killed_again_and_again(tmp_path, ranks, seed=1, count=count)
    assert kills == count and while_writing >= count // 10


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the group that it shows."""
    short_text(tmp_path, 700)
    job = Job(
        2, tmp_path / "run", FAULTY.replace("FAULT", "time.sleep(60)") + PROGRAM, [sys.executable]
    )
    assert job.trains()
    while not complete(job.folder):
        assert job.process.poll() is None, job.log.read_text()
        time.sleep(0.02)
    started = time.monotonic()
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.end() != 0 and time.monotonic() - started < 15
    assert "Traceback" not in job.log.read_text()
    for path in complete(job.folder):
        restore.verify(path)


def test_a_rank_that_raises_in_the_midst_of_a_pipeline_ends_the_job(tmp_path: Path) -> None:
    short_text(tmp_path, 700)
    fault = "raise ZeroDivisionError('the bug of rank 1')"
    job = Job(2, tmp_path / "run", FAULTY.replace("FAULT", fault) + PROGRAM)
    assert job.end() not in (0, 2)
    said = job.log.read_text()
    assert "[rank 1] ZeroDivisionError: the bug of rank 1" in said and "[rank 1] Traceback" in said
    assert "[rank 0]" not in said
    assert [path.name for path in complete(job.folder)][-1] in ("step-00000003", "step-00000004")


@pytest.mark.soak
def test_a_slow_rank_only_makes_the_others_wait(tmp_path: Path) -> None:
    text = short_text(tmp_path, 700)
    slow = Job(2, tmp_path / "slow", FAULTY.replace("FAULT", "time.sleep(3)") + PROGRAM)
    assert slow.end() == 0, slow.log.read_text()
    assert (
        train_on(
            2, RUN, SIZES, LAYOUTS[2], f"--steps {STEPS} --text {text} --save {tmp_path / 'calm'}"
        )
        == 0
    )
    recorded = metrics(slow.folder / "metrics.jsonl")
    assert recorded[4]["seconds"] > 3 > recorded[5]["seconds"]
    for ours, theirs in zip(recorded, metrics(tmp_path / "calm" / "metrics.jsonl"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
