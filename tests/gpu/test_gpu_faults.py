"""A rank is killed, collectives differ, a rank never comes: the job ends, with a report, and leaves
the GPU alone.
"""

from __future__ import annotations

import re
import time

import pytest
from jobs import DEVICE, HERE, job, processes_on_gpus
from ranks import torchrun

PROGRAM = HERE / "faults_on_ranks.py"
FAULTS = {
    "a_rank_is_killed": r"rank 1 is gone|rank +: 1 .*\n.*exitcode +: -9",
    "collectives_differ": r"MismatchError: .*",
    "a_rank_never_comes": r"Who waits for whom[\s\S]*receive from rank 1",
    "a_rank_never_comes_and_the_gpu_waits": r"Who waits for whom|[Ww]atchdog caught collective operation timeout",
}


@pytest.mark.gpu
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", FAULTS)
def test_a_job_that_goes_wrong_ends_with_a_report_and_leaves_the_gpu(name: str) -> None:
    before = processes_on_gpus()
    outcome = job(2, PROGRAM, name, timeout=150, limit=3)
    assert outcome.returncode not in (0, 124), "it ends, and by itself"
    assert outcome.stdout.count(f"up on {DEVICE.type}") == 2
    assert re.search(FAULTS[name], outcome.stderr), outcome.stderr
    deadline = time.monotonic() + 10
    while (left := processes_on_gpus() - before) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, f"processes stayed on the GPU: {left}"


def test_on_gloo_collectives_that_differ_end_the_job() -> None:
    outcome = torchrun(2, PROGRAM, "collectives_differ", timeout=100)
    assert outcome.returncode not in (0, 124) and outcome.stdout.count("up on cpu") == 2
    assert re.search(FAULTS["collectives_differ"], outcome.stderr), outcome.stderr
