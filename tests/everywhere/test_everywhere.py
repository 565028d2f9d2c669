"""What needs neither MPI nor Linux: simulated ranks, the player, grading on simulated ranks,
checkpoints of one rank, notebooks.

This file needs nothing of the other tests, so that macOS and Windows can run it alone:
`python -m pytest --noconftest tests/everywhere`. On Linux it also runs on a Python from which was
taken what Windows lacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What Windows has not. It is taken away once numpy and torch are there, which are others' work.
WINDOWS = """
import asyncio, fcntl, logging, multiprocessing, os, shutil, signal, ssl, subprocess, sys, tempfile, types
import numpy, torch, torch.distributed, safetensors.torch, torch.fx.experimental.symbolic_shapes

def locking(descriptor, mode, count, real=fcntl):
    real.flock(descriptor, real.LOCK_EX | real.LOCK_NB)


GONE = "fork geteuid getuid sched_getaffinity posix_fallocate statvfs waitpid"
for name in GONE.split():
    delattr(os, name)
for name in ("SIGKILL", "SIGUSR1", "SIGHUP"):
    delattr(signal, name)
for name in ("fcntl", "resource", "pwd", "termios"):
    sys.modules[name] = None

sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
opened = os.open


def refusing(path, flags, *rest, **more):
    if os.path.isdir(path) and sys._getframe(1).f_code.co_name == "flush":
        raise PermissionError(13, "Permission denied", str(path))
    return opened(path, flags, *rest, **more)


os.open = refusing
sys.platform = "win32"
"""
RANKS = """
import numpy as np
import minidist
from minidist import Cluster
from minidist.full.collectives import all_reduce
from minidist.draw.player import player
from minidist.draw.recording import record


def program(comm):
    buffer = np.full(3, comm.rank, dtype="float32")
    all_reduce(buffer, comm, algorithm="ring")
    return buffer.tolist(), comm.clock()


print(minidist.run(program, ranks=4, cluster=Cluster.h100(nodes=1))[3][0])
try:
    minidist.run(lambda comm: comm.recv(np.zeros(1), source=(comm.rank + 1) % comm.size), ranks=3)
except minidist.DeadlockError as error:
    print(str(error).splitlines()[-1].strip())
recording = record(
    lambda comm: all_reduce(comm.watch("buffer", np.full(4, comm.contribution), 4), comm), 4
)
print("</script>" in player(recording))
"""
SAID = ["[6.0, 6.0, 6.0]", "each waits for the next: 0 -> 1 -> 2 -> 0", "True"]
TRAIN = """
import sys
from pathlib import Path
from minidist.__main__ import main
from minidist.full.checkpoint.lock import hold
from minidist.full.checkpoint.store import CheckpointError

small = "train --layers 1 --hidden 16 --heads 2 --sequence 8 --batch 2 --steps 2 --seed 1".split()
assert main([*small, "--save", "run"]) == 0
assert main([*small[:-4], "--steps", "3", "--seed", "1", "--save", "run", "--resume"]) == 0
with hold(Path("run")):
    try:
        hold(Path("run"))
    except CheckpointError as error:
        print(error)
print(sorted(path.name for path in Path("run").glob("step-*")))
"""
ELSEWHERE = pytest.mark.skipif(sys.platform == "linux", reason="other tests do so here")
GRADE = "grade 02 --solution --simulated --task 1 --format json"


def python(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, with this checkout's package."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "0"}
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=300,
    )


def test_simulated_ranks_and_the_player(tmp_path: Path) -> None:
    ran = python(RANKS, tmp_path)
    assert ran.stdout.splitlines() == SAID, ran.stderr


@ELSEWHERE
def test_an_answer_is_graded_on_simulated_ranks(tmp_path: Path) -> None:
    run = f"import sys; from minidist.__main__ import main; sys.exit(main({GRADE.split()}))"
    ran = python(run, ROOT)
    assert ran.returncode == 0 and '"passed"' in ran.stdout, ran.stdout + ran.stderr
    assert "mpirun" not in ran.stdout


@ELSEWHERE
def test_training_on_one_rank_saves_and_goes_on(tmp_path: Path) -> None:
    ran = python(TRAIN, tmp_path)
    assert ran.returncode == 0 and "step-00000003" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the others lack it anyway")
def test_nothing_here_needs_what_windows_lacks(tmp_path: Path) -> None:
    ran = python(WINDOWS + RANKS + TRAIN, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[:3] == SAID and "step-00000003" in lines[-1]
    assert lines[-2].startswith("--save run is in use by another run")


@pytest.mark.skipif(sys.platform != "linux", reason="the others have no other way")
def test_cases_that_are_not_forked_are_graded_alike(tmp_path: Path) -> None:
    """As where the grader cannot fork: each case is a process of its own."""
    code = f"""
import sys
from minidist.course.grader import runner
from minidist.__main__ import main
runner.SUPPORTED = False
sys.exit(main({GRADE.split()}))
"""
    ran = python(code, ROOT)
    assert ran.returncode == 0 and '"passed"' in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ("01_ranks", "02_ring_all_reduce", "09_pipeline"))
def test_notebooks_run(name: str, tmp_path: Path) -> None:
    """All cells but those on real processes."""
    nbclient = pytest.importorskip("nbclient")
    from minidist.course.notebooks import cells_of

    notebook = cells_of(ROOT / "notebooks/src" / f"{name}.py")
    for cell in notebook.cells:
        if "real" in cell.metadata.get("tags", ()):
            cell.source = ""
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    assert any(cell.get("outputs") for cell in notebook.cells)
