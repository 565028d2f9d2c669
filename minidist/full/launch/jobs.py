"""Run a command together with everything it starts, and end all of that for certain.

    run_job([mpirun, ...])
        └─ mpirun ── proxy ── rank 0 ── whatever rank 0 started
                           └─ rank 1

Launchers put ranks into sessions of their own, and a launcher that is killed leaves its ranks to
run on. So every process of a job inherits a mark in its environment, and ending the job means: no
process bears the mark. If this process is killed itself, Linux asks mpirun to end, which ends them.
(`ENDS_WITH_US` asks Linux for that, and becomes the command. A `preexec_fn` would run Python in a
fork of this process, and before it does, Python frees what other threads have: a process group of
torch's among that waits for threads that the fork has not, for ever.)
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from minidist.full.comm.mpi_wire import segment

MARK = "MINIDIST_JOB"
TIMED_OUT = 124  # exit status, as of timeout(1)
ENDS_WITH_US = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1  # of prctl(2): which signal comes when the parent ends
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    print(f"{sys.argv[1]} cannot be started: {error.strerror}", file=sys.stderr)
    sys.exit(127)
"""


class Outcome(NamedTuple):
    """How a job ended. `stdout` and `stderr` are empty if they were not captured."""

    returncode: int
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False


def run_job(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float | None = None,
    capture: bool = False,
    grace: float = 2.0,
    user: str | None = None,
    hear: Callable[[str], None] | None = None,
) -> Outcome:
    """Run `command` in a session of its own until it ends.

    Leave no process of it behind, whatever happens.

    MPICH keeps segments in /dev/shm. Those that were made meanwhile, belong to the job's user and
    are used by no process any more are removed, whichever job made them.

    Parameters
    ----------
    env : mapping, optional
        The whole environment; default this process's.
    timeout : float, optional
        Seconds after which the job is ended; the status is then 124.
    capture : bool
        Collect the output and give the job no input, instead of sharing this process's.
    grace : float
        Seconds between SIGTERM and SIGKILL.
    user : str, optional
        Run it as this user and its group, which only root can. Default: as oneself.
    hear : callable, optional
        Called with each line of the job's standard error, which is passed on.
    """
    mark = secrets.token_hex(8)
    options, segments = become(user) | {"start_new_session": True}, segment.segments()
    if sys.platform == "linux":
        command = [sys.executable, "-ISc", ENDS_WITH_US, *command]
    if capture:
        options |= {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
    elif hear is not None:
        options |= {"stderr": subprocess.PIPE}
    marked = {**(os.environ if env is None else env), MARK: mark}
    process = subprocess.Popen(command, env=marked, cwd=cwd, text=True, errors="replace", **options)
    timed_out = False
    if hear is not None and not capture:
        reader = threading.Thread(target=_pass_on, args=(process.stderr, hear), daemon=True)
        process.stderr = None  # which `communicate` would read, too
        reader.start()
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
        end_job(process.pid, mark, grace)
        out, error = process.communicate()
    finally:
        try:  # also after Ctrl-C, and for what a rank left running
            end_job(process.pid, mark, grace)
        finally:
            segment.remove(segment.left_behind(user_id(user), segments))
    if hear is not None and not capture:
        reader.join(grace)
    status = process.wait()
    if timed_out:
        status = TIMED_OUT
    elif status < 0:
        status = 128 - status  # a shell's number for "ended by a signal"
    return Outcome(status, out or "", error or "", timed_out)


def _pass_on(lines: IO[str] | None, hear: Callable[[str], None]) -> None:
    for line in lines or ():
        sys.stderr.write(line)
        sys.stderr.flush()
        hear(line)


def become(user: str | None) -> dict[str, Any]:
    """Return the arguments that make `subprocess.Popen` run as another user."""
    if user is None:
        return {}
    import pwd

    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def user_id(user: str | None) -> int:
    """Return the number of a user, by default oneself."""
    if user is not None:
        import pwd

        return pwd.getpwnam(user).pw_uid
    return os.geteuid() if hasattr(os, "geteuid") else -1


def end_job(root: int, mark: str, grace: float) -> None:
    """Ask every process of the job to end; after `grace` seconds, or if Ctrl-C comes, make it."""
    if sys.platform == "win32":  # which has no signals for others, but knows a process's children
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(root)], capture_output=True)
        return
    left: set[int] = set()
    try:
        left = members(root, mark)  # which takes a while, in which Ctrl-C may come again
        send_signal(left, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while left and (left := left & parents().keys()) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        for _ in range(50):  # a process may be starting another one at this moment
            if not (left := (left & parents().keys()) | members(root, mark)):
                break
            send_signal(left, signal.SIGKILL)
            time.sleep(0.02)


def members(root: int, mark: str) -> set[int]:
    """Return the processes of a job: all that bear its mark, or where /proc is missing, `root` and
    its descendants.
    """
    if not Path("/proc/self/environ").exists():
        return descendants(root)
    line = f"{MARK}={mark}".encode()
    return {
        pid
        for pid, environment in _read_proc("environ").items()
        if line in environment.split(b"\0")
    }


def descendants(root: int, but: Collection[int] = ()) -> set[int]:
    """Return `root` and the running processes that descend from it, without some processes and
    their descendants.
    """
    table, found = parents(), {root}
    while (
        new := {pid for pid, parent in table.items() if parent in found and pid not in but} - found
    ):
        found |= new
    return found & table.keys()


def running(name: str) -> set[int]:
    """Return the processes below this one that run a command, or in which Python runs a module."""
    found = set()
    own = descendants(os.getpid()) - {os.getpid()}
    # torchrun is Python, too, and has the module among the words of its ranks
    module = re.compile(rf"[^\0]*python[^\0/]*\0(-[^cm\0]\0)*-m\0{re.escape(name)}\0")
    for pid, line in _read_proc("cmdline").items():
        words = line.decode(errors="replace")
        command = Path(words.partition("\0")[0]).name
        if pid in own and (command == name or module.match(words)):
            found.add(pid)
    return found


def parents() -> dict[int, int]:
    """Return the parent of each process that runs.

    A zombie does not: it waits until its parent asks for its status.
    """
    lines = [
        f"{pid} {stat.rpartition(b')')[2].decode()}"
        for pid, stat in _read_proc("stat").items()
        if stat
    ]
    if not lines:
        command = ["ps", "-A", "-o", "pid=,stat=,ppid="]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    rows = [line.split() for line in lines]
    return {int(pid): int(parent) for pid, status, parent, *_ in rows if status[0] not in "ZX"}


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to those of the processes that run and may be sent one."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _read_proc(name: str) -> dict[int, bytes]:
    """Return this file of /proc for each process that still runs and may be read."""
    found = {}
    for file in Path("/proc").glob(f"[0-9]*/{name}"):
        with suppress(OSError):
            found[int(file.parent.name)] = file.read_bytes()
    return found
