"""Jobs of NCCL's ranks on one GPU, for the tests of this folder; or of gloo's on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from ranks import clean_environment

from minidist.full.comm.torch_wire.gpus import sharing_fault
from minidist.full.launch.jobs import Outcome, run_job

CPU = os.environ.get("MINIDIST_TEST_DEVICE") == "cpu"
if CPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
DEVICE = torch.device("cpu" if CPU else "cuda")
ENGINE = "gloo" if CPU else "NCCL"
HERE = Path(__file__).parent
RANKS = [1, 2, 4]
PARTS = {
    "1/3": ("test_gpu_training.py",),
    "2/3": tuple(
        f"test_gpu_{name}.py"
        for name in (
            "attention",
            "flash",
            "collectives",
            "faults",
            "memory",
            "single",
            "checkpoints",
            "elastic",
        )
    ),
    "3/3": ("test_gpu_twins.py", "test_gpu_compiled.py", "test_gpu_adapters.py"),
}
DRAWS = HERE / "train_draws.py"
RIGHT = "  right, "  # what it prints of each run
ALIKE = "same bits on every rank yes"


def refusal(ranks: int) -> str:
    """Return why there can be no job of so many ranks here; empty if there can."""
    if CPU or ranks_per_gpu(ranks) == 1:
        return ""
    fault = sharing_fault()
    return (
        f"{ranks} ranks cannot share {torch.cuda.device_count()} GPUs: that {fault}"
        if fault
        else ""
    )


def ranks_per_gpu(ranks: int) -> int:
    return -(-ranks // max(1, torch.cuda.device_count()))


def job(
    ranks: int,
    *program: str | Path,
    timeout: float,
    limit: float = 60,
    on_cpu: bool = CPU,
    options: Sequence[str] = (),
) -> Outcome:
    """Run a program on so many ranks by `python -m minidist launch`, and print what it said; skip
    if it cannot be.
    """
    if sentence := refusal(ranks):
        pytest.skip(sentence)
    wire = ["--wire", "torch"] if on_cpu else ["--ranks-per-gpu", str(ranks_per_gpu(ranks))]
    launch = ["-n", str(ranks), "--limit", str(limit), *wire, *options]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "MINIDIST_RANKS_PER_GPU": "1"} if on_cpu else {}
    command = [sys.executable, "-m", "minidist", "launch", *launch, *map(str, program)]
    outcome = run_job(command, env=clean_environment() | hidden, timeout=timeout, capture=True)
    print(f"\n$ {' '.join(command[1:])}\n{outcome.stdout}\n{outcome.stderr}", flush=True)
    return outcome


def succeeds(ranks: int, *program: str | Path, timeout: float, on_cpu: bool = CPU) -> str:
    """Run such a job, which must end well; return what it printed."""
    # another rank may compile
    outcome = job(ranks, *program, timeout=timeout, limit=timeout / 2, on_cpu=on_cpu)
    assert outcome.returncode == 0, f"status {outcome.returncode}: {outcome.stderr[-3000:]}"
    return outcome.stdout


def verified(ranks: int, count: int, *words: str, timeout: float) -> None:
    """Train runs that `DRAWS` takes; all must give the serial run's parameters, on every rank."""
    said = succeeds(ranks, DRAWS, *words, timeout=timeout)
    assert said.count(RIGHT) == said.count(ALIKE) == said.count(f", {ENGINE}: train") == count


def processes_on_gpus() -> set[str]:
    """Return the processes that compute on a GPU, as its driver lists them; none where nothing can
    list them.
    """
    if CPU or shutil.which("nvidia-smi") is None:
        return set()
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return set(subprocess.run(command, capture_output=True, text=True).stdout.split())
