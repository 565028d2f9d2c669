"""`make torch-suite`: torch's own tests on our ranks, and a table of what became of them.

    python tests/torch_suite/run.py                simulated ranks
    python tests/torch_suite/run.py --mpi          four processes under mpirun
    python tests/torch_suite/run.py test_broadcast ...

On simulated ranks a test has a process of its own, forked from one that has imported torch: a test
that crashes or hangs takes no other with it. Under mpirun a job runs one after the other; the next
job begins after the test that has ended the last one. The status is 1 if a test fails.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

warnings.simplefilter("ignore")

from their_tests import MORE, MORE_RANKS, RANKS, OnThreads, names, place_of, run_on, why_not  # noqa: E402

import minidist  # noqa: E402
from minidist.comm import Communicator  # noqa: E402

LIMIT = 120.0  # seconds of a test
UNDER_MPI = str(Path(__file__).with_name("under_mpi.py"))
LINE = '["a test", '


class Outcome(NamedTuple):
    """What became of a test: `passed`, `not applicable` or `failed`, and why."""

    status: str
    why: str = ""


def main(argv: Sequence[str]) -> int:
    """Run the tests, print the table; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mpi", action="store_true")
    asked = parser.parse_args(argv)
    found: dict[str, Outcome] = {}
    for name, outcome in (under_mpi if asked.mpi else on_threads)(asked.names or names()):
        found[name] = outcome
        if outcome.status == "failed" or asked.names:
            print(f"{outcome.status:<8} {name}: {outcome.why}", flush=True)
    print(table(found))
    return int(any(each.status == "failed" for each in found.values()))


def on_threads(chosen: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    """Run tests on simulated ranks, on more of them if one asks for more."""
    for name in chosen:
        if why := why_not(name, threads=True):
            yield name, Outcome("not applicable", why)
            continue
        outcome = in_a_process(name, RANKS)
        yield name, in_a_process(name, MORE) if outcome.why == MORE_RANKS else outcome


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


def in_a_process(name: str, ranks: int) -> Outcome:
    """Run a test in a process that is a copy of this one."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.write(writing, json.dumps(simulated(name, ranks)).encode())
        os._exit(0)
    os.close(writing)
    said, deadline = b"", time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if select.select([reading], [], [], 1.0)[0]:
            if not (more := os.read(reading, 1 << 16)):
                break
            said += more
    else:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reading)
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


def table(found: dict[str, Outcome]) -> str:
    """Return how many tests passed, failed and do not apply, and why they do not."""
    count = Counter(each.status for each in found.values())
    applicable = count["passed"] + count["failed"]
    lines = [
        f"{count['passed']} of {applicable} that apply pass ({count['passed'] / max(1, applicable):.1%}); "
        f"{count['not applicable']} do not apply:"
    ]
    reasons = Counter(each.why for each in found.values() if each.status == "not applicable")
    lines += [f"{many:5}  {why}" for why, many in reasons.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
