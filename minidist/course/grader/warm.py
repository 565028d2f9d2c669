"""Processes that have imported what a lesson needs and fork for each case: importing torch takes longer than a case.

    grader ── "folder" ─▶ warm.main ── fork ─▶ child.main(folder): the student's code, from a clean state
           ◀── "." ──  (never runs it)  ── ends the child and all that it started, wherever that has hidden

The ranks of a case under mpirun are forked off the warm process as well: see launch/standin.py. Orphans among its
descendants become its children, so it can find and end them. An answer that ends the warm process loses its case, and
the next case gets a fresh process. Linux only: elsewhere every case imports for itself.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from minidist.course.grader import child
from minidist.course.lesson import load_checks
from minidist.launch.imports import quick_imports
from minidist.launch.jobs import MARK, become, descendants, end_job, send_signal
from minidist.launch.standin import fork_ranks

SUPPORTED = sys.platform == "linux"
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
PACKAGES = str(Path(__file__).parents[3])
START = "import sys; sys.path.insert(0, sys.argv[1]); sys.dont_write_bytecode = True; " + (
    "from minidist.course.grader import {0}; {0}.main(*sys.argv[2:])"
)
NEEDED = ("minidist.collectives",)  # by most answers, besides what the checks import
NEEDED_WITH_TORCH = (
    "minidist.parallel",
    "torch.fx.experimental.symbolic_shapes",
)  # the latter by the first backward of a process
GRACE = 5.0  # seconds beyond a case's limit before the warm process itself counts as stuck


def isolated(module: str, *arguments: object) -> list[str]:
    """Return the command that calls `main` of a module of this folder; Python looks at no path or file of a student."""
    return [sys.executable, "-I", "-c", START.format(module), PACKAGES, *map(str, arguments)]


class Warm:
    """Up to `processes` warm processes for one lesson's checks, run as `user`. A context manager: none outlives it."""

    def __init__(self, checks: Path, environment: dict[str, str], processes: int, user: str | None = None) -> None:
        self.checks, self.environment, self.user = checks, environment, user
        self.free: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self.started = itertools.count(os.getpid())  # numbers; graders beside each other begin at different ones
        for _ in range(processes):
            self.free.put(None)

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        while not self.free.empty():
            if (process := self.free.get()) is not None:
                process.end()

    def run(
        self, folder: Path, stand: Path, limit: float, ranks: int = 0, launch: Callable[[], object] = lambda: None
    ) -> None:
        """Run the case that lies in `folder`, standing in `stand`; its processes have ended when this returns.

        The case is one process, or `ranks` of them: then `launch` starts a stand-in for each, which connects to the
        socket `folder/ranks`, and returns when all have ended. `limit` is in seconds.
        """
        process = self.free.get()
        try:
            process = process or _Process(self.checks, self.environment, self.user, next(self.started))
            if not process.run(folder, stand, limit, ranks, launch):
                process.end()
                process = None
        finally:
            self.free.put(process)


class _Process:
    """One warm process, seen from the grader."""

    def __init__(self, checks: Path, environment: dict[str, str], user: str | None, number: int) -> None:
        self.mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            isolated("warm", checks, number),
            env={**environment, MARK: self.mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **become(user),
        )
        self.await_word(timeout=60)

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


# ---------------------------------------------------------------- in the warm process


def main(checks: str, number: str) -> None:
    """Import what the checks and the answers need; then fork for each case that is named on standard input.

    Simulated ranks take turns, and take half the time on a single core: processes of consecutive numbers have one each.
    """
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(number) % len(cores)]})
    with quick_imports():  # or the first collection of each child would write to, and so copy, all pages with objects
        imports = {name for check in load_checks(Path(checks)) for name in check.task.imports}
        for name in (*NEEDED, *(NEEDED_WITH_TORCH if "torch" in sys.modules else ()), *imports):
            importlib.import_module(name)
    os.write(1, b".")
    for line in sys.stdin:
        folder, stand, limit, ranks = json.loads(line)
        if ranks:
            if fork_listening(Path(folder), ranks):
                os.sched_setaffinity(0, cores)
                child.main(folder)
                return
        else:
            pid = os.fork()
            if pid == 0:
                run_forked(folder, stand)
            select.select([os.pidfd_open(pid)], [], [], limit + GRACE / 2)
        end_descendants()
        os.write(1, b".")


def run_forked(folder: str, stand: str) -> None:
    """Become the process that runs one case: in a session of its own, without a way to the grader."""
    try:
        os.setsid()
        os.chdir(stand)
        child.main(folder)
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


def end_descendants() -> None:
    """End and reap every process that descends from this one: each becomes its child when its own parent has ended."""
    with suppress(ChildProcessError):  # there is none any more
        while True:
            send_signal(descendants(os.getpid()) - {os.getpid()}, signal.SIGKILL)
            os.waitpid(-1, 0)
