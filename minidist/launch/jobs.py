"""Run a command together with everything it starts, and end all of that for certain.

    run_job([mpirun, ...])
        └─ mpirun ── proxy ── rank 0 ── whatever rank 0 started
                           └─ rank 1

Launchers put ranks into sessions of their own, and a launcher that is killed leaves its ranks to run on. So every
process of a job inherits a mark in its environment, and ending the job means: no process bears the mark.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "MINIDIST_JOB"
TIMED_OUT = 124  # exit status, as of timeout(1)


@dataclass(frozen=True)
class Outcome:
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
) -> Outcome:
    """Run `command` in a session of its own until it ends; leave no process of it behind, whatever happens.

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
    """
    mark = secrets.token_hex(8)
    environment = {**(os.environ if env is None else env), MARK: mark}
    pipe = subprocess.PIPE if capture else None
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL if capture else None,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        start_new_session=True,
        **become(user),
    )
    timed_out = False
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
        end_job(process.pid, mark, grace)
        out, error = process.communicate()
    finally:
        end_job(process.pid, mark, grace)  # also after Ctrl-C, and for what a rank left running
    code = process.wait()
    status = TIMED_OUT if timed_out else 128 - code if code < 0 else code  # a shell's number for "ended by a signal"
    return Outcome(status, out or "", error or "", timed_out)


def become(user: str | None) -> dict[str, Any]:
    """Return the arguments that make `subprocess.Popen` run as another user."""
    if user is None:
        return {}
    import pwd

    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def end_job(root: int, mark: str, grace: float) -> None:
    """Ask every process of the job to end; after `grace` seconds make it."""
    job = members(root, mark)
    if not job:
        return
    _signal(job, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while (left := [pid for pid in job if _alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for _ in range(50):  # a process may be starting another one at this moment
        left = sorted({pid for pid in left if _alive(pid)} | set(members(root, mark)))
        if not left:
            return
        _signal(left, signal.SIGKILL)
        time.sleep(0.02)


def members(root: int, mark: str) -> list[int]:
    """Return the processes of a job: all that bear its mark, or where /proc is missing, the descendants of `root`."""
    if Path("/proc/self/environ").exists():
        line = f"{MARK}={mark}".encode()
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if line in _environment(entry)]
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True).stdout
    rows = [line.split() for line in table.splitlines()]
    alive = {int(row[0]): int(row[1]) for row in rows if not row[2].startswith("Z")}
    job = {root} & alive.keys()
    while new := {pid for pid, parent in alive.items() if parent in job} - job:
        job |= new
    return sorted(job)


def _environment(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to somebody else
        return []


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _alive(pid: int) -> bool:
    """Tell whether a process runs. A zombie does not: it only waits until its parent asks for its status."""
    if Path("/proc/self/stat").exists():
        with suppress(OSError):  # it has ended
            stat = Path(f"/proc/{pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] not in "ZX"
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
