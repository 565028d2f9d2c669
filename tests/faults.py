"""Run a program that goes wrong under `mpirun`, and see how it ends: for the tests of faults, short
and long.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ranks import clean_environment

from minidist.full.comm.mpi_wire import segment

# taken once: pytest changes its own while other threads start jobs
ENVIRONMENT = clean_environment()

PREAMBLE = """
import ctypes, os, signal, sys, threading, time
EARLY
import numpy as np
import minidist
from minidist.full.collectives import all_reduce, broadcast

comm = minidist.init(limit=LIMIT)
other = 1 - comm.rank
def one():
    return np.ones(1)
"""


@dataclass(frozen=True)
class Job:
    """A started `mpirun`."""

    process: subprocess.Popen[bytes]
    marker: str
    folder: Path

    def await_output(self, word: str, times: int) -> None:
        """Return once the ranks have printed `word` so many times."""
        while (self.folder / "out").read_text().count(word) < times:
            time.sleep(0.02)

    def ranks(self) -> list[int]:
        """Return the processes of the ranks, without the children that guard their arrival."""
        pythons = [
            pid for pid in bearing(self.marker) if pid != self.process.pid and _is_python(pid)
        ]
        return [pid for pid in pythons if _parent(pid) not in pythons]


@dataclass(frozen=True)
class Fault:
    """What the ranks do (`early` before they arrive), what happens meanwhile, and what must be said
    about it.
    """

    body: str
    words: list[str] = field(default_factory=list)
    early: str = ""
    limit: float = 1
    ranks: int = 2
    meanwhile: Callable[[Job], None] | None = None


@dataclass(frozen=True)
class Ended:
    """How a job ended, and after how many seconds."""

    status: int
    out: str
    error: str
    seconds: float


def run_to_its_end(fault: Fault, folder: Path) -> Ended:
    """Run the fault's program; fail if it takes a minute, or if a process of it is left twenty
    seconds later.
    """
    program, marker = folder / "program.py", "marker-" + secrets.token_hex(8)
    preamble = PREAMBLE.replace("EARLY", textwrap.dedent(fault.early)).replace(
        "LIMIT", str(fault.limit)
    )
    program.write_text(preamble + textwrap.dedent(fault.body))
    mpirun = Path(sys.executable).with_name("mpirun")
    started, segments = time.monotonic(), segment.segments()
    with open(folder / "out", "wb") as out, open(folder / "error", "wb") as error:
        process = subprocess.Popen(
            [mpirun, "-n", str(fault.ranks), sys.executable, program, marker],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            env=ENVIRONMENT,
            start_new_session=True,
        )
    try:
        if fault.meanwhile is not None:
            fault.meanwhile(Job(process, marker, folder))
        status = process.wait(60)
        seconds = time.monotonic() - started
        while (left := bearing(marker)) and time.monotonic() < started + seconds + 20:
            time.sleep(0.02)
        assert not left, f"processes stayed behind: {left}"
    finally:
        for pid in {process.pid, *bearing(marker)} if process.poll() is None else bearing(marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if fault.early:  # a job that ends before all ranks have come to init() leaves MPI's segment
            segment.remove(segment.left_behind(os.geteuid(), segments))
    return Ended(status, (folder / "out").read_text(), (folder / "error").read_text(), seconds)


def bearing(marker: str) -> list[int]:
    """Return the processes that have `marker` among their arguments and are not merely waiting to
    be reaped.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if marker.encode() in (entry / "cmdline").read_bytes() and not zombie:
                found.append(int(entry.name))
    return found


def _is_python(pid: int) -> bool:
    with suppress(OSError):
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    return False


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def send(number: signal.Signals, to: str, ranks: int = 2) -> Callable[[Job], None]:
    """Return what sends a signal to `mpirun`, to its whole `group`, or to one `rank`, once all have
    started.
    """

    def interrupt(job: Job) -> None:
        job.await_output("started", ranks)
        time.sleep(0.1)
        if to == "group":
            os.killpg(job.process.pid, number)
        else:
            os.kill(job.process.pid if to == "mpirun" else max(job.ranks()), number)

    return interrupt
