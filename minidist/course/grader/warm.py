"""A process that has imported what lessons need and forks for each case: importing torch takes
longer than a case.

    grader ── "folder" ─▶ importer ── fork ─▶ child.main(folder): the student's code, from a clean state
           ◀── status ──  (never runs it) ── end what that has started, wherever it has hidden

The ranks of a case under mpirun are such forks, too: see full/launch/standin.py, whose protocol the
grader itself speaks for simulated ranks. Orphans among the descendants of the importer become its
children, so it can find and end them. An answer that ends the importer, or makes it stand still,
loses its case, and the next case gets a fresh one. Linux only: elsewhere every case imports for
itself.
"""

import atexit
import ctypes
import importlib
import json
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
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from minidist.course.grader import child
from minidist.course.lesson import load_checks
from minidist.course.texts import barred_texts, globals_of_modules
from minidist.full.launch.imports import quick_imports
from minidist.full.launch.jobs import MARK, become, descendants, end_job, send_signal
from minidist.full.launch.standin import STAND_IN, end_with, fork_ranks

SUPPORTED = sys.platform == "linux"
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
PACKAGES = str(Path(__file__).parents[3])
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from minidist.course.grader import {0}; "
    "{0}.main(*sys.argv[2:])"
)
# where an importer listens, in its folder: the name of a socket has to be a short one
SOCKET = "/proc/{}/cwd/socket"
# by most answers and by each child, besides what the checks import; numpy imports the last for a
# median
NEEDED = ("minidist.full.collectives", "resource", "numpy.ma")
# the latter by a first backward
NEEDED_WITH_TORCH = ("minidist.full.exports", "torch.fx.experimental.symbolic_shapes")
# seconds beyond its limit until a case is ended, and then until the importer counts as stuck
GRACE = 2.5
PATIENCE = 60.0  # seconds that imports may take


def isolated(module: str, *arguments: object) -> list[str]:
    """Return the command that calls `main` of a module of this folder; Python looks at no path or
    file of a student.
    """
    return [sys.executable, "-I", "-B", "-c", START.format(module), PACKAGES, *map(str, arguments)]


class Warm(AbstractContextManager["Warm"]):
    """What forks for some lessons' checks, up to `processes` at a time, as `user`. A context
    manager: none outlives it. `imports` are what answers import, besides what their tasks name.

    Simulated ranks take turns, and take half the time on a single core, so each of the cases has a
    core of its own.
    """

    def __init__(
        self,
        checks: Sequence[Path],
        environment: dict[str, str],
        processes: int,
        user: str | None = None,
        imports: Sequence[str] = (),
    ):
        self.mark, self.imports = secrets.token_hex(8), ",".join(imports)
        self.environment, self.user = {**environment, MARK: self.mark}, user
        self.folder = tempfile.TemporaryDirectory(
            prefix="minidist-grade-", ignore_cleanup_errors=True
        )
        if user is not None:
            shutil.chown(self.folder.name, user)
        self.importer: subprocess.Popen[bytes] | None = None
        self.starting = threading.Lock()
        self.copies = tempfile.TemporaryDirectory(
            prefix="minidist-grade-", ignore_cleanup_errors=True
        )
        os.chmod(self.copies.name, 0o755)  # `user` reads there, and cannot write
        self.copied: dict[Path, Path] = {}
        self.checks = [self.copy_of(path.parent) / path.name for path in checks]
        self.cores: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(processes):
            # graders beside each other begin at different ones
            self.cores.put(os.getpid() + number)

    def __exit__(self, *_: object) -> None:
        self.end(self.importer)
        self.folder.cleanup()
        self.copies.cleanup()

    def copy_of(self, lesson: Path) -> Path:
        """Return the copy of a lesson's folder from which its cases run: an answer that finds the
        checks' files by its callers must not change the lesson.
        """
        with self.starting:
            if lesson not in self.copied:
                copy = self.copied[lesson] = Path(self.copies.name, str(len(self.copied)))
                shutil.copytree(lesson, copy, ignore=shutil.ignore_patterns("mistakes"))
            return self.copied[lesson]

    def run(self, folder: Path, stand: Path, limit: float) -> None:
        """Run the case of simulated ranks that lies in `folder`, standing in `stand`, for about
        `limit` seconds.
        """
        core = self.cores.get()
        try:
            importer, answered = self.ready(), False
            # what is left in the folder for temporary files goes with it
            environment = {**self.environment, "TMPDIR": str(stand)}
            told = json.dumps([[], str(stand), environment, [str(folder), str(core)]])
            # an answer may have ended the importer
            with suppress(OSError), socket.socket(socket.AF_UNIX) as case:
                case.connect(SOCKET.format(importer.pid))
                case.sendall(b"." + told.encode() + b"\n")
                if not select.select([case], [], [], limit + GRACE)[0]:
                    case.shutdown(socket.SHUT_WR)  # so the system ends the case
                answered = bool(select.select([case], [], [], GRACE)[0]) and case.recv(8) != b""
            if not answered:
                self.end(importer)
        finally:
            self.cores.put(core)  # or other cases would wait for it for ever

    def rank(self, folder: Path) -> list[str]:
        """Return the command that stands in for a rank of the case under mpirun that lies in
        `folder`.
        """
        return [
            sys.executable,
            "-I",
            "-S",
            "-c",
            STAND_IN,
            SOCKET.format(self.ready().pid),
            str(folder),
        ]

    def ready(self) -> subprocess.Popen[bytes]:
        """Return the process that has imported what cases need. It is started first, if it is not
        there.
        """
        with self.starting:
            if self.importer is None or self.importer.poll() is not None:
                options = become(self.user) | {"cwd": self.folder.name, "start_new_session": True}
                options |= {
                    "stdin": subprocess.PIPE,
                    "stdout": subprocess.PIPE,
                    "stderr": subprocess.DEVNULL,
                }
                self.importer = subprocess.Popen(
                    isolated("warm", self.imports, *self.checks), env=self.environment, **options
                )
                assert self.importer.stdout is not None
                select.select([self.importer.stdout], [], [], PATIENCE)
            return self.importer

    def end(self, importer: subprocess.Popen[bytes] | None) -> None:
        """End an importer and all that bears its mark, unless somebody has done so."""
        with self.starting:
            if importer is not None and importer is self.importer:
                end_job(importer.pid, self.mark, grace=0.2)
                importer.communicate()
                self.importer = None


# ---------------------------------------------------------------- in the process that has imported


def main(imported: str, *checks: str) -> None:
    """Import what checks and answers need; then fork for each case, or rank of a case, that
    connects.
    """
    # become the parent of every descendant whose own parent ends
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    atexit.register(leave)  # the first, so it is called last
    # or the first collection of each child would write to, and so copy, all pages with objects
    with quick_imports():
        loaded = {path: load_checks(Path(path)) for path in checks}
        imports = {
            name for found in loaded.values() for check in found for name in check.task.imports
        }
        for name in (*filter(None, imported.split(",")), *NEEDED, *imports):
            importlib.import_module(name)
        for name in NEEDED_WITH_TORCH if "torch" in sys.modules else ():
            importlib.import_module(name)
        for path, found in loaded.items():
            for check in found:
                barred_texts(check.task, str(Path(path).parent))
        prepared = child.Prepared(loaded, child.seal(), len(sys.modules), globals_of_modules())
    end_with(0)  # the other end of standard input is the grader
    with socket.socket(socket.AF_UNIX) as listener:
        Path("socket").unlink(missing_ok=True)  # of one that was ended
        listener.bind("socket")
        listener.listen()
        os.write(1, b".")
        arguments = fork_ranks(listener, float("inf"), end_descendants)
    assert arguments is not None, "the importer itself is ended, and never returns"
    folder, *core = arguments
    os.setsid()  # without a way to the grader
    if core:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(*core) % len(cores)]})
    child.main(folder, prepared)


def leave() -> None:
    """End a rank at once: to clear all that it has imported takes longer than most cases."""
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        MPI.Finalize()
    os._exit(0)


def end_descendants(but: Collection[int] = ()) -> None:
    """End and reap every process that descends from this one, but not some, and what descends from
    those.
    """
    while left := descendants(os.getpid(), but) - {os.getpid()}:
        send_signal(left, signal.SIGKILL)
    with suppress(ChildProcessError):  # there is none any more
        while not but:
            os.waitpid(-1, 0)
