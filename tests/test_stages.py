"""`python -m minidist stages`: every stage holds less than the one before, and all end where a serial run does."""

from __future__ import annotations

import re
import shlex

import pytest
from ranks import mpirun
from training import PROGRAM, TINY

import minidist
from minidist.cli.stages import stages
from minidist.cli.together import stopping_together

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
COLUMNS = ("parameters", "gradients", "optimizer", "activations", "communication", "at once", "sent")


def stages_on(ranks: int, *words: str) -> int:
    """Run on threads; return the status that the job would have."""
    argv = [*TINY, *shlex.split(" ".join(words))]
    return max(minidist.run(lambda comm: stopping_together("stages", comm, lambda: stages(argv, comm)), ranks))


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert stages_on(4, "--layers 6 --steps 3 --hidden 32") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("DDP", "ZeRO"))]
    rows: dict[str, dict[str, float]] = {}
    for line in lines:
        name, _, rest = line.partition("  ")
        sizes = [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) (B|KiB|MiB)", rest)]
        rows[name] = dict(zip(COLUMNS, sizes, strict=True))
    ddp, one, two, three, groups, recomputed = rows.values()
    assert one["optimizer"] == pytest.approx(ddp["optimizer"] / 4, rel=0.02) == two["optimizer"]
    assert groups["optimizer"] == pytest.approx(ddp["optimizer"] / 2, rel=0.02)
    assert two["gradients"] < one["gradients"]
    assert three["parameters"] < groups["parameters"] < ddp["parameters"] == one["parameters"] == two["parameters"]
    assert recomputed["activations"] < three["activations"] / 2
    assert ddp["sent"] == one["sent"] == two["sent"] < groups["sent"] < three["sent"] < 1.5 * ddp["sent"]


def test_under_mpirun() -> None:
    job = mpirun(2, PROGRAM, "stages", *TINY, "--steps", "2", timeout=100)
    assert job.returncode == 0, job.stderr
    assert "ZeRO-3, recompute full" in job.stdout and "in groups" not in job.stdout  # which would be of one rank each


def test_bad_input_gets_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert stages_on(2, "--dp 3") == 2
    assert capsys.readouterr().err == "minidist stages: dp = 3, but 2 ranks were started: use mpirun -n 3, or --dp 2\n"
