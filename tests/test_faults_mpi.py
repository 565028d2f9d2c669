"""What goes wrong on MPI ranks ends the job: soon, with a status that is not 0, in words, and with no process left."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from ranks import clean_environment

PREAMBLE = """
import ctypes, os, signal, sys, threading, time
EARLY
import numpy as np
import minidist
from minidist.collectives import all_reduce, broadcast

comm = minidist.init(limit=LIMIT)
other = 1 - comm.rank
def one():
    return np.ones(1)
"""


@dataclass
class Ended:
    """How a job ended, and after how many seconds."""

    status: int
    out: str
    error: str
    seconds: float


def run_to_its_end(
    folder: Path,
    body: str,
    ranks: int = 2,
    early: str = "",
    limit: float = 1,
    meanwhile: Callable[[subprocess.Popen[bytes], str], None] | None = None,
) -> Ended:
    """Run a program under `mpirun`; fail if it takes 20 seconds, or if a process of it is left two seconds later."""
    program, marker = folder / "program.py", "marker-" + secrets.token_hex(8)
    text = PREAMBLE.replace("EARLY", textwrap.dedent(early)).replace("LIMIT", str(limit))
    program.write_text(text + textwrap.dedent(body))
    command = [Path(sys.executable).with_name("mpirun"), "-n", str(ranks), sys.executable, program, marker]
    started = time.monotonic()
    with open(folder / "out", "wb") as out, open(folder / "error", "wb") as error:
        process = subprocess.Popen(
            command, stdout=out, stderr=error, stdin=subprocess.DEVNULL, env=clean_environment(), start_new_session=True
        )
    try:
        if meanwhile is not None:
            meanwhile(process, marker)
        status = process.wait(20)
        seconds = time.monotonic() - started
        while (left := bearing(marker)) and time.monotonic() < started + seconds + 2:
            time.sleep(0.02)
        assert not left, f"processes stayed behind: {left}"
    finally:
        for pid in [process.pid, *bearing(marker)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return Ended(status, (folder / "out").read_text(), (folder / "error").read_text(), seconds)


def bearing(marker: str) -> list[int]:
    """Return the processes that have `marker` among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if marker.encode() in (entry / "cmdline").read_bytes() and not zombie:
                found.append(int(entry.name))
    return found


# what the ranks do, and what must be said about it
FAULTS: dict[str, tuple[str, list[str]]] = {
    "receives that never match": (
        """
        comm.recv(one(), other, tag=comm.rank)  # both at once
        """,
        [
            r"rank 0 waits .* receive from rank 1 \(tag 0, 8 bytes\) at program\.py:\d+",
            r"rank 1 waits .* receive from rank 0 \(tag 1, 8 bytes\) at program\.py:\d+",
            r"longer than one operation may \(limit 1 s\)",
        ],
    ),
    "a rank that raises": (
        """
        if comm.rank == 1:
            raise ValueError("bad luck")
        comm.recv(one(), 1)
        """,
        [r"\[rank 1\] Traceback", r"\[rank 1\] ValueError: bad luck", r'\[rank 1\] .*raise ValueError\("bad luck"\)'],
    ),
    "a rank that raises while the other computes": (
        """
        if comm.rank == 1:
            raise ValueError("bad luck")
        time.sleep(600)
        """,
        [r"\[rank 1\] ValueError: bad luck"],
    ),
    "a stream whose work raises while nobody waits for it": (
        """
        def fails():
            raise KeyError("no such bucket")
        stream = comm.stream()
        if comm.rank == 0:
            stream.launch(fails)
        comm.recv(one(), other)
        """,
        [r"\[rank 0\] KeyError: 'no such bucket'"],
    ),
    "a stream that waits in vain": (
        """
        stream = comm.stream()
        if comm.rank == 0:
            stream.launch(all_reduce, one(), stream.comm, "sum", "ring").wait()
        comm.barrier()
        """,
        [r"rank 0 waits .* on a stream: .*receiving from rank 1 \(inside a collective, \d bytes\) in all_reduce"],
    ),
    "a rank that exits": (
        """
        if comm.rank == 1:
            sys.exit(3)
        comm.recv(one(), 1)
        """,
        [r"rank 1 has finished", r"rank 0 waits .* at program\.py:\d+"],
    ),
    "a rank that exits without a word": (
        """
        if comm.rank == 1:
            os._exit(3)
        comm.recv(one(), 1)
        """,
        [],
    ),
    "a rank that is killed": (
        """
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.recv(one(), 1)
        """,
        [],
    ),
    "a rank that crashes": (
        """
        if comm.rank == 1:
            ctypes.string_at(0)
        comm.recv(one(), 1)
        """,
        [],
    ),
    "a rank that is stopped": (
        """
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.recv(one(), 1)
        """,
        [r"rank 0 waits .* receive from rank 1", r"rank 1 does not answer"],
    ),
    "a rank that computes for ever": (
        """
        while comm.rank == 1:
            time.sleep(0.1)  # here
        comm.recv(one(), 1)
        """,
        [r"rank 0 waits .* receive from rank 1", r"rank 1 computes at program\.py:\d+"],
    ),
    "a thread that cannot end": (
        """
        if comm.rank == 1:
            threading.Thread(target=time.sleep, args=(600,)).start()
            sys.exit()
        comm.recv(one(), 1)
        """,
        [r"rank 0 waits .* receive from rank 1"],
    ),
    "the first collective on one rank only": (
        """
        if comm.rank == 0:
            all_reduce(one(), comm)
        """,
        [r"rank 0 waits .* all ranks to come to .* in all_reduce at program\.py:\d+", r"rank 1 has finished"],
    ),
    "a later collective on one rank only": (
        """
        all_reduce(one(), comm)
        if comm.rank == 0:
            all_reduce(one(), comm)
        """,
        [r"rank 0 waits .* meet at a fence with rank 1 .* in all_reduce", r"rank 1 has finished"],
    ),
    "a native collective on one rank only": (
        """
        if comm.rank == 0:
            all_reduce(one(), comm, algorithm="native")
        """,
        [r"rank 0 waits .* all ranks to come to all_reduce native in all_reduce at program\.py:\d+"],
    ),
    "a split on one rank only": (
        """
        if comm.rank == 0:
            comm.split(0)
        """,
        [r"rank 0 waits .* all ranks to come to split at program\.py:\d+"],
    ),
    "an allocation on one rank only": (
        """
        if comm.rank == 0:
            comm.allocate(10, "f4")
        comm.recv(one(), other)
        """,
        [r"rank 0 waits .* all ranks to come to", r"rank 1 waits .* receive from rank 0"],
    ),
    "a message too long": (
        """
        comm.send(np.ones(100_000), 1) if comm.rank == 0 else comm.recv(one(), 0)
        """,
        [r"\[rank 1\] .*MismatchError: a message is larger than the 8 bytes"],
    ),
    "a message too short": (
        """
        comm.send(one(), 1) if comm.rank == 0 else comm.recv(np.ones(100_000), 0)
        """,
        [r"\[rank 1\] .*MismatchError: rank 0 sent 8 bytes, but the receive has a buffer of 800000 \(tag 0\)"],
    ),
    "collectives of different sizes": (
        """
        all_reduce(np.ones(10 + comm.rank), comm, algorithm="recursive")
        """,
        [r"MismatchError: .*give both the same shape and dtype"],
    ),
    "collectives in different order, in debug mode": (
        """
        comm.debug = True
        for call in (all_reduce, broadcast)[:: 1 - 2 * comm.rank]:
            call(one(), comm)
        """,
        [r"MismatchError: .*rank 0 calls all_reduce\(float64, 1, sum, auto\); rank 1 calls broadcast\(float64, 1"],
    ),
    "large sends against each other": (
        """
        comm.send(np.ones(1_000_000), other)
        comm.recv(np.ones(1_000_000), other)
        """,
        [r"rank 0 waits .* send to rank 1 \(tag 0, 8000000 bytes\)", r"rank 1 waits .* send to rank 0"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_job(fault: str, tmp_path: Path) -> None:
    body, words = FAULTS[fault]
    ended = run_to_its_end(tmp_path, body)
    assert ended.status != 0
    assert ended.seconds < 8, "it took too long to end"
    for word in words:
        assert re.search(word, ended.error), ended.error


ABSENCES = {
    "asleep before it starts MPI": "time.sleep(600)",
    "asleep when MPI has started": "from mpi4py import MPI; time.sleep(600)",
    "gone before it starts MPI": "sys.exit()",
    "failing before it starts MPI": "raise ImportError('no such module')",
}


@pytest.mark.parametrize("absence", ABSENCES)
def test_a_rank_that_never_arrives_ends_the_job(absence: str, tmp_path: Path) -> None:
    early = f"""
    if os.environ["PMI_RANK"] == "1":
        {ABSENCES[absence]}
    """
    ended = run_to_its_end(tmp_path, "comm.barrier()", early=early)
    assert ended.status != 0 and ended.seconds < 5
    assert "after 1 s not all ranks have come to minidist.init()" in ended.error


@pytest.mark.parametrize("call", ("comm.recv(one(), 1)", "all_reduce(one(), comm)", "comm.split(0)"))
def test_nobody_waits_for_the_limit_if_a_rank_has_finished(call: str, tmp_path: Path) -> None:
    body = f"""
    if comm.rank == 1:
        time.sleep(2.5)  # rank 0 asks, is told that this rank computes, and asks again
        sys.exit(3)
    {call}
    """
    ended = run_to_its_end(tmp_path, body, limit=300)
    assert ended.status != 0 and ended.seconds < 10
    assert "rank 0 waits for rank 1, which has finished (limit 300 s)" in ended.error


def test_an_exit_status_survives_if_all_ranks_come_to_their_end(tmp_path: Path) -> None:
    ended = run_to_its_end(tmp_path, "comm.barrier()\nsys.exit(3 * comm.rank)")
    assert ended.status == 3
    ended = run_to_its_end(tmp_path, "comm.barrier()\ntime.sleep(2 * comm.rank)\nprint('done', flush=True)", limit=1)
    assert ended.status == 0 and ended.out.count("done") == 2, "who ends later has as long as it likes"
    assert ended.error == ""


@pytest.mark.parametrize("who", ("mpirun's group", "mpirun alone"))
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
@pytest.mark.parametrize("body", ("comm.recv(one(), other)", "time.sleep(600)", "while True: all_reduce(one(), comm)"))
def test_interrupting_the_job_leaves_nobody(body: str, number: signal.Signals, who: str, tmp_path: Path) -> None:
    def interrupt(process: subprocess.Popen[bytes], marker: str) -> None:
        while (tmp_path / "out").read_text().count("started") < 2:
            time.sleep(0.02)
        time.sleep(0.1)
        os.killpg(process.pid, number) if who == "mpirun's group" else os.kill(process.pid, number)

    ended = run_to_its_end(tmp_path, "print('started', flush=True)\n" + body, limit=300, meanwhile=interrupt)
    assert ended.status != 0 and ended.seconds < 8


def test_killing_any_process_of_four_ends_all(tmp_path: Path) -> None:
    def kill_one(process: subprocess.Popen[bytes], marker: str) -> None:
        while (tmp_path / "out").read_text().count("started") < 4:
            time.sleep(0.02)
        ranks = [pid for pid in bearing(marker) if pid != process.pid]
        os.kill(max(ranks), signal.SIGKILL)

    body = "print('started', flush=True)\nwhile True: all_reduce(np.ones(1000), comm)"
    ended = run_to_its_end(tmp_path, body, ranks=4, limit=300, meanwhile=kill_one)
    assert ended.status != 0 and ended.seconds < 8
