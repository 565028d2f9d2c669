"""`train --verify` on 1, 2 and 4 ranks, with layouts and options that are drawn; each prints its seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import CPU, ENGINE, HERE, succeeds
from ranks import torchrun
from train_draws import VERDICT, draw

from minidist.parallel.pipeline import NAMES

COUNTS = {1: 8, 2: 28, 4: 20}  # of seeds on so many ranks
PROGRAM: Path = HERE / "train_draws.py"


def verified(ranks: int, first: int, count: int, *more: str, timeout: float) -> str:
    """Run some seeds; all must give the serial run's parameters. Return what was printed."""
    said = succeeds(ranks, PROGRAM, str(first), str(count), *more, timeout=timeout)
    assert said.count(f"{VERDICT} yes") == said.count(f", {ENGINE}: train") == count, "each was compared"
    return said


@pytest.mark.gpu
@pytest.mark.timeout(330)
@pytest.mark.parametrize("ranks", COUNTS)
def test_random_layouts_and_options_train_what_the_serial_run_does(ranks: int) -> None:
    verified(ranks, 0, COUNTS[ranks], timeout=300)


@pytest.mark.gpu
@pytest.mark.timeout(330)
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_blocks_train_what_the_serial_run_does(ranks: int) -> None:
    verified(ranks, 101, 1 if CPU else 2, "--compile", timeout=300)


def test_the_draws_have_every_option() -> None:
    drawn = {ranks: [" ".join(draw(seed, ranks)) for seed in range(count)] for ranks, count in COUNTS.items()}
    policies = [f"--recompute {policy}" for policy in ("none", "full", "selective", "sqrt", "every 2")]
    precisions = [f"--precision {name}" for name in ("float64", "float32", "bfloat16", "float16")]
    stages = [f"--zero {stage}" for stage in (1, 2, 3)]
    for words in (*policies, *precisions, *stages, "--offload memory", "--tied", "--dropout 0.1"):
        assert all(any(words in line for line in lines) for lines in drawn.values()), words
    for words in ("--sp", *(f"--schedule {name} " for name in NAMES)):
        assert all(any(words in line for line in drawn[ranks]) for ranks in (2, 4)), words
    for words in ("--hsdp 2", "--hsdp 1", "--strategy naive", "--strategy server", "--bucket-mib", "--key-value"):
        assert any(words in line for lines in drawn.values() for line in lines), words


def test_a_draw_on_gloo_trains_what_the_serial_run_does() -> None:
    job = torchrun(2, PROGRAM, "7", "1", timeout=100)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count(f"{VERDICT} yes") == job.stdout.count(", gloo: train") == 1
