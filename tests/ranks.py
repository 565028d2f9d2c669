"""Run a program on real ranks: `mpirun(4, code)` and `torchrun(2, code)`, for tests.

Each call runs in a session of its own, and no process outlives it: not after a timeout, not after a
failure.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

from warm import PYTHON, executable, warm

from minidist.full.launch.jobs import run_job
from minidist.full.launch.mpirun import Mpirun, environment, find_mpirun

TESTS = Path(__file__).parent
# programs import from all of them
FOLDERS = sorted({TESTS, *(path.parent for path in TESTS.rglob("test_*.py"))})
LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "MV2_", "SLURM_", "HYDI_", "TORCHELASTIC_")
OTHERS = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONUNBUFFERED",
}


def mpirun(
    ranks: int,
    program: str | Path,
    *args: str,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    python: Sequence[str] = (),
) -> CompletedProcess[str]:
    """Run `program`, a path or source code (dedented), on `ranks` processes of the mpirun that fits
    this Python.

    A job that outlasts `timeout` seconds is ended and returns 124. `env` is added to the
    environment. Programs can import what lies in `tests/`. Ranks are forked off a Python that has
    torch, unless another `python` is named.
    """
    launcher = _launcher()
    needed = environment(launcher) | clean_environment()
    start = [launcher.path, "-n", str(ranks), *(python or warm_python())]
    return _run(start, program, args, timeout, needed | dict(env or {}))


def torchrun(
    ranks: int,
    program: str | Path,
    *args: str,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    restarts: int = 0,
    rendezvous: str = "static",
) -> CompletedProcess[str]:
    """Run `program` under torchrun on `ranks` processes of this machine, as `mpirun` does."""
    python, port = warm_python(), str(free_port())
    where = ["--max-restarts", str(restarts), "--nproc-per-node", str(ranks)]
    if rendezvous == "static":
        where += ["--master-addr", "127.0.0.1", "--master-port", port]
    else:  # TorchElastic's
        where += ["--rdzv-backend", rendezvous, "--rdzv-endpoint", f"127.0.0.1:{port}"]
        where += ["--local-addr", "127.0.0.1"]
    start = [*python, "-m", "torch.distributed.run", *where, "--no-python", *python]
    return _run(start, program, args, timeout, clean_environment() | dict(env or {}))


def free_port() -> int:
    """Return a TCP port that nobody listens on, below those that the system gives to connections:
    it stays free while a job starts again.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def clean_environment() -> dict[str, str]:
    """Return this process's environment, as if no launcher had started it; a printed line goes out
    in one piece.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in OTHERS and not name.startswith(LAUNCHERS)
    }
    path = os.pathsep.join(
        filter(None, [*map(str, FOLDERS), str(TESTS.parent), kept.get("PYTHONPATH", "")])
    )
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def warm_python(*more: str) -> list[str]:
    """Return what starts a program as Python does, by a fork of one that has torch, and `more`
    modules.
    """
    return (
        warm(clean_environment()["PYTHONPATH"], *more)
        if sys.platform == "linux"
        else [sys.executable]
    )


def warm_environment(*more: str) -> dict[str, str]:
    """Return the environment for a program that begins with `warm_python(*more)`, and whose own ranks are
    to start so, too.

    They are forks: to a signal other than SIGKILL they do not listen.
    """
    warm = {PYTHON: executable(warm_python(*more))} if sys.platform == "linux" else {}
    return clean_environment() | warm


@functools.cache
def _launcher() -> Mpirun:
    return find_mpirun()


def _run(
    start: list[str],
    program: str | Path,
    args: tuple[str, ...],
    timeout: float,
    env: dict[str, str],
) -> CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(program, str) and ("\n" in program or not program.endswith(".py")):
            source, program = program, Path(folder, "program.py")
            program.write_text(textwrap.dedent(source))
        command = [*start, str(program), *args]
        outcome = run_job(command, env=env, timeout=timeout, capture=True)
    return CompletedProcess(command, outcome.returncode, outcome.stdout, outcome.stderr)
