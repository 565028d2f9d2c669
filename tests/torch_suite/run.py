"""`make torch-suite`: torch's own tests on our ranks, and a table of what became of them.

    python tests/torch_suite/run.py                         simulated ranks, then mpirun
    python tests/torch_suite/run.py --on simulated          one of the two
    python tests/torch_suite/run.py test_broadcast ...      these tests

On simulated ranks a test has a process of its own, forked from one that has imported torch: a test
that crashes or hangs takes no other with it. Two run at a time. Under mpirun a job runs one after
the other; the next job begins after the test that has ended the last one. The status is 1 if a test
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

warnings.simplefilter("ignore")

from their_tests import (  # noqa: E402
    MORE,
    MORE_RANKS,
    RANKS,
    OnThreads,
    names,
    place_of,
    run_on,
    wants_gpu,
    why_not,
)

import minidist  # noqa: E402
from minidist.full.comm import Communicator  # noqa: E402

LIMIT = 120.0  # seconds of a test
AT_ONCE = 2
UNDER_MPI = str(Path(__file__).with_name("under_mpi.py"))
LINE = '["a test", '


class Outcome(NamedTuple):
    """What became of a test: `passed`, `not applicable` or `failed`, and why."""

    status: str
    why: str = ""


class Child(NamedTuple):
    """A process that runs a test."""

    name: str
    pid: int
    reading: int
    deadline: float


def main(argv: Sequence[str]) -> int:
    """Run the tests, print the tables; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--on", choices=WIRES, action="append")
    asked = parser.parse_args(argv)
    if unknown := set(asked.names) - set(names()):
        parser.error(f"torch has no test {', '.join(sorted(unknown))}")
    failed = False
    for wire in asked.on or WIRES:
        found: dict[str, Outcome] = {}
        for name, outcome in WIRES[wire](asked.names or names()):
            found[name] = outcome
            if outcome.status == "failed" or asked.names:
                print(f"{outcome.status:<8} {name}: {outcome.why}", flush=True)
        print(table(wire, found), flush=True)
        failed |= any(each.status == "failed" for each in found.values())
    return int(failed)


def on_threads(chosen: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    """Run tests on simulated ranks, on more of them if one asks for more."""
    running: deque[Child] = deque()
    for name in chosen:
        if why := why_not(name, threads=True):
            yield name, Outcome("not applicable", why)
            continue
        running.append(started(name, RANKS))
        if len(running) == AT_ONCE:
            yield finished(running.popleft())
    while running:
        yield finished(running.popleft())


def finished(child: Child) -> tuple[str, Outcome]:
    """Return what became of a test. If it asks for more ranks, run it on more."""
    outcome = ended(child)
    if outcome.why == MORE_RANKS:
        outcome = ended(started(child.name, MORE))
    return child.name, outcome


def under_mpi(chosen: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    """Run tests on processes under mpirun, on more of them if one asks for more."""
    left = []
    for name in chosen:
        if why := why_not(name, threads=False):
            yield name, Outcome("not applicable", why)
        else:
            left.append(name)
    want_more = []
    for name, outcome in in_jobs(left, RANKS):
        if outcome.why == MORE_RANKS:
            want_more.append(name)
        else:
            yield name, outcome
    yield from in_jobs(want_more, MORE)


def in_jobs(left: list[str], ranks: int) -> Iterator[tuple[str, Outcome]]:
    """Run tests in as many jobs as it takes."""
    while left:
        with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
            job = subprocess.run(
                ["mpirun", "-n", str(ranks), sys.executable, UNDER_MPI, *left],
                env=os.environ | {"TEMP_DIR": folder, "WORLD_SIZE": str(ranks)},
                capture_output=True,
                text=True,
                timeout=LIMIT * len(left),
            )
        for line in job.stdout.splitlines():
            if line.startswith(LINE):
                _, name, why = json.loads(line)
                left = left[1:]
                yield name, Outcome("not applicable", why) if why else Outcome("passed")
        if left:
            yield left[0], Outcome("failed", job.stderr[-1500:])
            left = left[1:]


def started(name: str, ranks: int) -> Child:
    """Begin a test in a process that is a copy of this one. What it prints is not shown."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.write(writing, json.dumps(simulated(name, ranks)).encode())
        os._exit(0)
    os.close(writing)
    return Child(name, pid, reading, time.monotonic() + LIMIT)


def ended(child: Child) -> Outcome:
    """Wait for a test's process; one that outlasts the limit is ended."""
    said = b""
    while True:
        left = child.deadline - time.monotonic()
        if not select.select([child.reading], [], [], max(0.0, left))[0]:
            os.kill(child.pid, signal.SIGKILL)
            break
        if not (more := os.read(child.reading, 1 << 16)):
            break
        said += more
    _, status = os.waitpid(child.pid, 0)
    os.close(child.reading)
    if not said:
        return Outcome("failed", f"its process ended with {os.waitstatus_to_exitcode(status)}")
    return Outcome(*json.loads(said))


def simulated(name: str, ranks: int) -> Outcome:
    """Run a test on simulated ranks of this process."""
    os.environ["WORLD_SIZE"] = str(ranks)

    def program(comm: Communicator) -> str:
        return run_on(OnThreads, name, comm.rank)

    try:
        with place_of(name):
            skipped = [why for why in minidist.run(program, ranks, torch=True, limit=60) if why]
    except BaseException as error:
        return Outcome("failed", f"{type(error).__name__}: {str(error)[:500]}")
    return Outcome("not applicable", skipped[0]) if skipped else Outcome("passed")


def table(wire: str, found: dict[str, Outcome]) -> str:
    """Return how many tests passed, failed and do not apply, and why they do not."""
    count = Counter(each.status for each in found.values())
    applicable = count["passed"] + count["failed"]
    passed = [name for name, each in found.items() if each.status == "passed"]
    for_gpus = sum(wants_gpu(name) for name in passed)
    lines = [
        f"{WORDS[wire]}: {len(found)} tests",
        f"{count['passed']:5}  passed, of {applicable} that apply "
        f"({count['passed'] / max(1, applicable):.1%})",
        f"{for_gpus:5}  of these are marked for GPUs: their tensors lie on the CPU",
        f"{count['failed']:5}  failed",
        f"{count['not applicable']:5}  do not apply:",
    ]
    reasons = Counter(each.why for each in found.values() if each.status == "not applicable")
    lines += [f"{many:12}  {why}" for why, many in reasons.most_common()]
    return "\n".join(lines)


Runner = Callable[[Sequence[str]], Iterator[tuple[str, Outcome]]]
WIRES: dict[str, Runner] = {"simulated": on_threads, "mpirun": under_mpi}
WORDS = {"simulated": "on simulated ranks", "mpirun": "on processes under mpirun"}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
