"""The book in an empty folder: it trains by threads, mpirun and torchrun; a killed save loses nothing."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import minidist

PAGES = sorted(Path(minidist.__file__).parent.glob("*.py"))
SIZES = {"layers": 2, "hidden": 16, "heads": 2, "sequence": 8, "batch": 8}
SMALL = [f"--{name}={size}" for name, size in SIZES.items()]


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """Copy the pages into an empty folder, and return the environment of a Python that has them."""
    (tmp_path / "minidist").mkdir()
    for page in PAGES:
        shutil.copy(page, tmp_path / "minidist")
    # Otherwise torch looks in these pages for the backend of the package that is installed.
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return {**os.environ, **off, "PYTHONPATH": str(tmp_path), "PWD": str(tmp_path)}


def python(alone: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        command, env=alone, cwd=alone["PWD"], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "start",
    [
        f"{sys.executable} -m minidist.train --ranks 8 --dp 2 --tp 2 --pp 2",
        f"mpirun -n 8 {sys.executable} -m minidist.train --dp 2 --tp 2 --pp 2",
        f"{sys.executable} -m torch.distributed.run --nproc-per-node 4 -m minidist.train --tp 2 --sp",
    ],
    ids=("threads", "mpirun", "torchrun"),
)
def test_it_trains_and_every_parameter_equals_the_serial_run(
    alone: dict[str, str], start: str
) -> None:
    output = python(alone, *start.split(), *SMALL, "--steps=2", "--verify")
    assert "verified: every parameter equals the serial run" in output
    assert "step 2: loss" in output


def test_messages_between_arrays_need_no_torch(alone: dict[str, str]) -> None:
    text = (
        "import sys, numpy; from minidist.threads import run; from minidist.mesh import Mesh\n"
        "from minidist.collectives import all_reduce\n"
        "def program(comm):\n    x = numpy.ones(3); all_reduce(x, Mesh(comm, {'dp': 2})['dp'])\n"
        "    return float(x[0])\n"
        "print(run(program, 2), 'torch' in sys.modules)"
    )
    assert python(alone, sys.executable, "-c", text).split() == ["[2.0,", "2.0]", "False"]


def test_a_rank_that_fails_under_mpirun_ends_the_job_and_is_named(alone: dict[str, str]) -> None:
    text = (
        "from minidist.processes import init\ncomm = init()\n"
        "if comm.rank == 1: raise KeyError('gone')\ncomm.barrier()"
    )
    command = ["mpirun", "-n", "3", sys.executable, "-c", text]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "[rank 1] KeyError: 'gone'" in done.stderr


def test_a_kill_at_any_moment_of_a_save_loses_nothing(alone: dict[str, str]) -> None:
    """Save after each step, kill, and look: what is there is whole, and a run goes on from it."""
    folder = Path(alone["PWD"]) / "runs"
    command = [sys.executable, "-m", "minidist.train", "--ranks", "2", *SMALL]
    saving = [*command, "--steps", "1000", "--save", str(folder), "--save-every", "1"]
    for wait in (0.0, 0.03):
        shutil.rmtree(folder, ignore_errors=True)
        process = subprocess.Popen(saving, env=alone, stdout=subprocess.DEVNULL)
        while not list(folder.glob("step-*")):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        newest = max(folder.glob("step-*"))
        steps = str(int(newest.name.removeprefix("step-")) + 1)
        output = python(alone, *command, "--steps", steps, "--resume", str(folder), "--verify")
        assert "verified" in output
