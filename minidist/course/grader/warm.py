"""Processes that have imported what lessons need and fork for each case: importing torch takes longer than a case.

    grader ── "folder" ─▶ cases ── fork ─▶ child.main(folder): the student's code, from a clean state
           ◀── "." ──    (never run it)  ── end the child and all that it started, wherever that has hidden

One process imports; those that fork for cases, one for each case at a time, are forked off it. The ranks of a case
under mpirun are forks, too: see launch/standin.py. Orphans among the descendants of such a process become its children,
so it can find and end them. An answer that ends one of these processes loses its case, and the next case gets a fresh
process. Linux only: elsewhere every case imports for itself.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import itertools
import json
import math
import os
import queue
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from minidist.course.grader import child
from minidist.course.lesson import load_checks
from minidist.launch.imports import quick_imports
from minidist.launch.jobs import MARK, become, descendants, end_job, send_signal
from minidist.launch.standin import STAND_IN, end_with, fork_ranks

SUPPORTED = sys.platform == "linux"
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
PACKAGES = str(Path(__file__).parents[3])
START = "import sys; sys.path.insert(0, sys.argv[1]); sys.dont_write_bytecode = True; " + (
    "from minidist.course.grader import {0}; {0}.main(*sys.argv[2:])"
)
NEEDED = ("minidist.collectives", "resource")  # by most answers and by each child, besides what the checks import
NEEDED_WITH_TORCH = ("minidist.parallel", "torch.fx.experimental.symbolic_shapes")  # the latter by a first backward
GRACE = 5.0  # seconds beyond a case's limit before the process that forks it itself counts as stuck
PATIENCE = 60.0  # seconds that imports may take


def isolated(module: str, *arguments: object) -> list[str]:
    """Return the command that calls `main` of a module of this folder; Python looks at no path or file of a student."""
    return [sys.executable, "-I", "-c", START.format(module), PACKAGES, *map(str, arguments)]


class Warm:
    """Up to `processes` warm processes for some lessons' checks, run as `user`. A context manager: none outlives it."""

    def __init__(
        self, checks: Sequence[Path], environment: dict[str, str], processes: int, user: str | None = None
    ) -> None:
        self.checks, self.environment, self.user = checks, environment, user
        self.free: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self.numbers = itertools.count(os.getpid())  # graders beside each other begin at different ones
        self.folder = tempfile.TemporaryDirectory(prefix="minidist-grade-", ignore_cleanup_errors=True)
        if user is not None:
            shutil.chown(self.folder.name, user)
        self.importer: _Process | None = None
        self.starting = threading.Lock()
        for _ in range(processes):
            self.free.put(None)

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*(self.free.get() for _ in range(self.free.qsize())), self.importer):
            if process is not None:
                process.end()
        self.folder.cleanup()

    def run(
        self, folder: Path, stand: Path, limit: float, ranks: int = 0, launch: Callable[[], object] = lambda: None
    ) -> None:
        """Run the case that lies in `folder`, standing in `stand`; its processes have ended when this returns.

        The case is one process, or `ranks` of them: then `launch` starts a stand-in for each, which connects to the
        socket `folder/ranks`, and returns when all have ended. `limit` is in seconds.
        """
        process = self.free.get()
        try:
            process = process or self.fork()
            if not process.run(folder, stand, limit, ranks, launch):
                process.end()
                process = None
        finally:
            self.free.put(process)

    def fork(self) -> _Process:
        """Return a new process that forks for cases. The one that imports is started first, if it is not there."""
        command = [sys.executable, "-I", "-S", "-c", STAND_IN, "socket", str(next(self.numbers))]
        with self.starting:
            if self.importer is not None:
                if (process := self.start(command)).ready:
                    return process
                process.end()
                self.importer.end()
            self.importer = self.start(isolated("warm", *self.checks))
            return self.start(command)

    def start(self, command: Sequence[str]) -> _Process:
        """Start a process in the folder of the socket."""
        return _Process(command, self.environment, self.folder.name, self.user)


class _Process:
    """One warm process, seen from the grader. `ready` tells whether it said that it is."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: str, user: str | None) -> None:
        self.mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            command,
            env={**environment, MARK: self.mark},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **become(user),
        )
        self.ready = self.await_word(PATIENCE)

    def run(self, folder: Path, stand: Path, limit: float, ranks: int, launch: Callable[[], object]) -> bool:
        """Run a case; tell whether this process is still fit for another."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([str(folder), str(stand), limit, ranks]).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:  # it has ended since
            return False
        if ranks:
            if not self.await_word(GRACE):
                return False
            launch()
            limit = 0.0
        return self.await_word(limit + GRACE)

    def await_word(self, timeout: float) -> bool:
        """Tell whether the process said that it is ready, before `timeout` seconds were over."""
        out = self.process.stdout
        assert out is not None
        return bool(select.select([out], [], [], timeout)[0]) and os.read(out.fileno(), 1) == b"."

    def end(self) -> None:
        """End it and whatever bears its mark."""
        end_job(self.process.pid, self.mark, grace=0.2)
        self.process.communicate()


# ---------------------------------------------------------------- in the processes that have imported


def main(*checks: str) -> None:
    """Import what checks and answers need. Then fork, for each stand-in that connects, a process that runs cases."""
    adopt_orphans()
    atexit.register(leave)  # the first, so it is called last
    with quick_imports():  # or the first collection of each child would write to, and so copy, all pages with objects
        loaded = {path: load_checks(Path(path)) for path in checks}
        imports = {name for found in loaded.values() for check in found for name in check.task.imports}
        for name in (*NEEDED, *(NEEDED_WITH_TORCH if "torch" in sys.modules else ()), *imports):
            importlib.import_module(name)
        prepared = child.Prepared(loaded, child.seal(), len(sys.modules))
    end_with(0)  # the other end of standard input is the grader
    with socket.socket(socket.AF_UNIX) as listener:
        Path("socket").unlink(missing_ok=True)  # of one that was ended
        listener.bind("socket")
        listener.listen()
        os.write(1, b".")
        arguments = fork_ranks(listener, math.inf, end_descendants)
    run_cases(prepared, *map(int, arguments or ()))


def run_cases(prepared: child.Prepared, number: int) -> None:
    """Fork for each case that is named on standard input.

    Simulated ranks take turns, and take half the time on a single core: processes of consecutive numbers have one each.
    """
    adopt_orphans()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    os.write(1, b".")
    for line in sys.stdin:
        folder, stand, limit, ranks = json.loads(line)
        if ranks:
            if fork_listening(Path(folder), ranks):
                os.sched_setaffinity(0, cores)
                child.main(folder, prepared)
                return
        else:
            pid = os.fork()
            if pid == 0:
                run_forked(folder, stand, prepared)
            case = os.pidfd_open(pid)
            select.select([case], [], [], limit + GRACE / 2)
            os.close(case)
        end_descendants()
        os.write(1, b".")


def run_forked(folder: str, stand: str, prepared: child.Prepared) -> None:
    """Become the process that runs one case: in a session of its own, without a way to the grader."""
    try:
        os.setsid()
        os.chdir(stand)
        child.main(folder, prepared)
    finally:
        os._exit(1)


def fork_listening(folder: Path, ranks: int) -> bool:
    """Fork a rank for each stand-in that connects to `folder/ranks`, and wait for all; tell whether this is a rank."""
    os.chdir(folder)  # the name of a socket is a short one
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("ranks")
        listener.listen(ranks)
        os.chdir("/")
        os.write(1, b".")
        return fork_ranks(listener, ranks) is not None


def leave() -> None:
    """End a rank at once: to clear all that it has imported takes longer than most cases."""
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        MPI.Finalize()
    os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def end_descendants(but: Collection[int] = ()) -> None:
    """End and reap every process that descends from this one, but not some, and what descends from those."""
    while left := descendants(os.getpid(), but) - {os.getpid()}:
        send_signal(left, signal.SIGKILL)
    with suppress(ChildProcessError):  # there is none any more
        while not but:
            os.waitpid(-1, 0)
