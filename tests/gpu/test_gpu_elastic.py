"""A job on the GPU loses a rank, and goes on by itself: it ends with the numbers of an unbroken run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from jobs import job, succeeds
from training import DEADLY, TINY, losses, tensors

STEPS = 8
RUN = f"--precision float64 --lr 0.01 --steps {STEPS} --save-every 2 --sample 0"


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("spares", ["0", "1"])
def test_a_job_goes_on_when_a_rank_is_killed(spares: str, tmp_path: Path) -> None:
    """On one rank less, which then accumulates, and on a spare."""
    program = tmp_path / "deadly.py"
    program.write_text(DEADLY)
    words = [*TINY, *shlex.split(RUN)]
    calm, broken = tmp_path / "calm", tmp_path / "broken"
    succeeds(1, "-m", "minidist", "train", *words, "--save", str(calm), timeout=120)
    options = ["--max-restarts", "1", "--spares", spares]
    done = job(2, program, *words, "--save", str(broken), timeout=200, options=options)
    assert done.returncode == 0, done.stderr
    assert f"restart 1 of at most 1, {1 + int(spares)} ranks" in done.stderr
    assert "resumed after step" in done.stdout
    ours, theirs = (losses(run / "metrics.jsonl") for run in (broken, calm))
    assert [step for step, _ in ours] == list(range(1, STEPS + 1))
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-9)
    last = f"step-{STEPS:08}"
    expected, found = tensors(calm / last), tensors(broken / last)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-9, atol=1e-12), name
