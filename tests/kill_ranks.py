"""A program for tests: `mpirun` trains, one of its ranks is killed, again and again; the numbers
are the calm run's.

    python kill_ranks.py FOLDER RANKS SEED COUNT

A job is killed COUNT times, at random moments: while it starts, trains, or writes one of the
checkpoints that it saves at every step. Each time it has to end by itself, with a status that is
not 0, leaving no process; then it is resumed. Prints how many kills there were, and how many of
them came while a checkpoint was being written.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ranks import clean_environment, warm_python
from training import PROGRAM, RUN, TINY, losses, same_bits, short_text

from minidist.full.checkpoint.store import complete
from minidist.full.launch.jobs import MARK, end_job, members
from minidist.full.launch.mpirun import environment, find_mpirun

STEPS = 12
# a checkpoint takes about as long as a step
SIZES = "--hidden 64 --layers 4 --dropout 0.1 --keep 3"
LAYOUTS = {2: "--pp 2 --tied", 4: "--pp 2 --dp 2 --zero 1 --schedule zb-h1"}
PATIENCE = 15.0
"""Seconds within which a job has to end when a rank is gone."""


class Job:
    """A run under `mpirun`, which goes on from the checkpoints in `folder` if there are some."""

    def __init__(
        self, ranks: int, folder: Path, program: str = PROGRAM, python: Sequence[str] = ()
    ) -> None:
        self.ranks, self.folder, self.mark = ranks, folder, secrets.token_hex(8)
        self.log, self.source = folder.with_suffix(".log"), folder.with_suffix(".py")
        for rank in range(ranks):
            self._pid(rank).unlink(missing_ok=True)
        where = f"{folder}-pid"
        self.source.write_text(
            f"import os\nopen('{where}' + os.environ['PMI_RANK'], 'w').write(str(os.getpid()))\n"
        )
        with self.source.open("a") as source:
            source.write(program)
        words = [
            *TINY,
            *RUN.split(),
            *SIZES.split(),
            *LAYOUTS[ranks].split(),
            "--steps",
            str(STEPS),
        ]
        words += ["--text", str(folder.with_name("short.txt")), "--save", str(folder)]
        launcher = find_mpirun()
        command = [
            str(launcher.path),
            "-n",
            str(ranks),
            *(python or warm_python()),
            str(self.source),
            "train",
            *words,
        ]
        command += ["--resume"] if complete(folder) else []
        with self.log.open("w") as log:
            env = environment(launcher) | clean_environment() | {MARK: self.mark}
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def _pid(self, rank: int) -> Path:
        return self.folder.with_name(f"{self.folder.name}-pid{rank}")

    def trains(self) -> bool:
        """Wait until the ranks train, or the job has ended; return whether it is still there."""
        while "parameters in float64" not in self.log.read_text() and self.process.poll() is None:
            time.sleep(0.02)
        return self.process.poll() is None

    def kill(self, rank: int) -> bool:
        """Kill one rank; return whether it was still there."""
        with suppress(ProcessLookupError, FileNotFoundError, ValueError):
            os.kill(int(self._pid(rank).read_text()), signal.SIGKILL)
            return True
        return False

    def end(self) -> int:
        """Check that the job ends by itself and leaves nothing; return its exit status."""
        try:
            status = self.process.wait(60 if self.process.poll() is None else 0)
            deadline = time.monotonic() + 60
            while (left := members(self.process.pid, self.mark)) and time.monotonic() < deadline:
                time.sleep(0.05)  # the launcher does not wait for the last rank to be gone
            assert not left, f"processes stayed behind: {left}\n{self.log.read_text()}"
            return status
        finally:
            end_job(self.process.pid, self.mark, grace=0.5)
            self.process.wait()


def killed_again_and_again(home: Path, ranks: int, seed: int, count: int) -> tuple[int, int]:
    """Kill `count` times and compare; return how many kills there were, and how many came during a
    checkpoint.
    """
    short_text(home, 700)
    calm = Job(ranks, home / "calm")
    assert calm.end() == 0, calm.log.read_text()
    chance, kills, while_writing, runs = random.Random(seed), 0, 0, 0
    while kills < count:
        runs += 1
        folder = home / f"run{runs}"
        while kills < count:
            writing = kill_at_random(Job(ranks, folder), chance)
            if writing is None:
                break
            kills, while_writing = kills + 1, while_writing + writing
        check(ranks, folder, home / "calm")
    return kills, while_writing


def kill_at_random(job: Job, chance: random.Random) -> bool | None:
    """Kill one rank at some moment; return whether a checkpoint was being written, or None if the
    job was faster.
    """
    aimed = chance.random() < 0.5  # at a checkpoint's way to the disk
    if chance.random() < 0.9:
        job.trains()
        time.sleep(chance.uniform(0, 1.2))
        while aimed and not is_writing(job.folder) and job.process.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.05))
    else:
        time.sleep(chance.uniform(0.5, 4))
    writing = is_writing(job.folder)
    alive = job.process.poll() is None and job.kill(chance.randrange(job.ranks))
    started = time.monotonic()
    status = job.end()
    if not alive or (status == 0 and complete(job.folder)[-1].name == f"step-{STEPS:08d}"):
        assert status == 0, job.log.read_text()
        return None
    assert status != 0, f"status 0, but a rank was killed\n{job.log.read_text()}"
    assert time.monotonic() - started < PATIENCE, "the job did not notice that a rank is gone"
    return writing


def is_writing(folder: Path) -> bool:
    """Whether a checkpoint has been begun and is not complete."""
    return any(folder.glob(".unfinished*"))


def check(ranks: int, folder: Path, calm: Path) -> None:
    """Let the run go on to its end, and compare with the one that was left alone."""
    job = Job(ranks, folder)
    assert job.end() == 0, job.log.read_text()
    last = f"step-{STEPS:08d}"
    assert same_bits(folder / last, calm / last), f"{folder} differs"
    assert losses(folder / "metrics.jsonl") == losses(calm / "metrics.jsonl"), folder
    assert [path.name for path in complete(folder)][-2:] == [path.name for path in complete(calm)][
        -2:
    ], folder
    # nor to save: what a kill left is still there
    idle = "nothing is left to train" in job.log.read_text()
    assert idle or not list(folder.glob(".unfinished*")), folder


if __name__ == "__main__":
    ranks, seed, count = map(int, sys.argv[2:])
    print("kills, while writing:", *killed_again_and_again(Path(sys.argv[1]), ranks, seed, count))
