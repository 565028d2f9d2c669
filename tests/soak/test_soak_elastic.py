"""Jobs whose ranks are killed at random moments, again and again: they end with the calm run's numbers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from ranks import clean_environment
from training import TINY, losses, short_text, tensors, train_on

from minidist.full.checkpoint.store import newest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]

STEPS = 300
PROGRAM = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
from minidist.__main__ import main
sys.exit(main(["train", *sys.argv[2:]]))
"""
LAUNCHES = {
    "mpirun": ["-n", "2", "--max-restarts", "99", "--spares", "99"],
    "torchrun": ["-n", "2", "--max-restarts", "99", "--spares", "99", "--wire", "torch"],
    "replace": ["-n", "3", "--replace", "--max-restarts", "99"],
    "replace pairs": ["-n", "4", "--replace", "--max-restarts", "99", "--replica", "2"],
    "replace groups": ["-n", "4", "--replace", "--max-restarts", "99", "--replica", "2"],
}
CUTS = {"replace pairs": ["--pp", "2"], "replace groups": ["--zero", "3", "--hsdp", "2"]}
MODELS = {"replace pairs": ["--layers", "2"]}
KILLS = 60


def alive(pids: Path) -> list[int]:
    return [int(path.name) for path in pids.iterdir() if Path("/proc", path.name).exists()]


def words(home: Path, folder: str, layout: list[str]) -> list[str]:
    text = ["--text", str(home / "short.txt"), "--precision", "float64", "--log-every", "1"]
    saved = ["--save", str(home / folder), "--save-every", "10"]
    return [*TINY, *text, *saved, "--steps", str(STEPS), *layout]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_ranks_are_killed_at_random_moments(launch: str, tmp_path: Path) -> None:
    chance, kills, jobs = random.Random(7), 0, 0
    cut, model = CUTS.get(launch, []), MODELS.get(launch, [])
    short_text(tmp_path, 700)
    (tmp_path / "program.py").write_text(PROGRAM)
    assert train_on(1, " ".join(words(tmp_path, "calm", model))) == 0
    while kills < KILLS:
        jobs += 1
        pids, folder = tmp_path / f"pids{jobs}", f"run{jobs}"
        pids.mkdir()
        command = [sys.executable, "-m", "minidist", "launch", *LAUNCHES[launch]]
        command += [str(tmp_path / "program.py"), str(pids), *words(tmp_path, folder, cut + model)]
        with (tmp_path / f"log{jobs}").open("w") as log:
            job = subprocess.Popen(command, stdout=log, stderr=log, env=clean_environment())
        while job.poll() is None and kills < KILLS:
            time.sleep(chance.uniform(0.2, 4.0))
            for victim in chance.sample(
                alive(pids), min(len(alive(pids)), chance.choice([1, 1, 2]))
            ):
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    kills += 1
        said = (tmp_path / f"log{jobs}").read_text
        assert job.wait(300) == 0, said()[-3000:]
        assert alive(pids) == []
        check(tmp_path, folder, said())
    print(f"{launch}: {kills} kills, {jobs} jobs")


def check(home: Path, folder: str, said: str) -> None:
    ours, theirs = (losses(home / run / "metrics.jsonl") for run in (folder, "calm"))
    assert [step for step, _ in ours] == list(range(1, STEPS + 1)), said[-3000:]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-9)
    saved, expected = (tensors(newest(home / run)) for run in (folder, "calm"))
    for name, tensor in expected.items():
        assert torch.allclose(saved[name], tensor, rtol=1e-9, atol=1e-12), name
