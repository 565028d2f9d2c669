"""Ranks that die in the midst of training: the job ends, says why, leaves no process, and loses no
checkpoint.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from ranks import clean_environment, warm_python
from training import PROGRAM, TINY, short_text, tensors

import minidist
from minidist.cli.train import train
from minidist.full.checkpoint import restore
from minidist.full.checkpoint.store import complete, newest
from minidist.full.launch.jobs import MARK, end_job, members, run_job

KILLS = Path(__file__).parents[1] / "kills.py"
ENDLESS = [*TINY, "--steps", "1000000", "--save-every", "5", "--keep", "3", "--strategy"]

# One rank has a bug of its own
BUG = """
import sys
from minidist.full.trainer import loop
take = loop.Trainer.step
def step(self, number, *rest):
    if number == 12 and self.comm.rank == 1:
        raise ZeroDivisionError("the bug of rank 1")
    return take(self, number, *rest)
loop.Trainer.step = step
"""


# ---------------------------------------------------------------- killed, and resumed


def test_a_run_killed_at_any_moment_ends_with_the_same_bits(tmp_path: Path) -> None:
    before_files, at_random = kills(tmp_path, 2, 45, seed=0, count=3)
    assert before_files >= 3 and at_random >= 3


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_run_killed_at_very_many_moments(tmp_path: Path) -> None:
    before_files, at_random = kills(tmp_path, 1, 1, seed=1, count=300)
    assert before_files > 150 and at_random >= 300


def kills(folder: Path, first: int, every: int, seed: int, count: int) -> tuple[int, int]:
    """Return how often the run was killed, before it touched a file and at random; see
    `kills.py`.
    """
    command = [*warm_python(), str(KILLS), str(folder), *map(str, (first, every, seed, count))]
    done = run_job(command, env=clean_environment(), timeout=1100, capture=True)
    assert done.returncode == 0, done.stderr
    before_files, at_random = done.stdout.rpartition("kills: ")[2].split()
    return int(before_files), int(at_random)


# ---------------------------------------------------------------- a rank of several


class Job:
    """A program on 2 ranks, which writes checkpoints until something happens to it."""

    def __init__(self, folder: Path, program: str, strategy: str, python: Sequence[str]) -> None:
        self.folder, self.mark, self.log = folder / "run", secrets.token_hex(8), folder / "log"
        source, text = folder / "program.py", short_text(folder)
        source.write_text(
            f"import os\nopen(f'{folder}/pid{{os.environ[\"PMI_RANK\"]}}', "
            f"'w').write(str(os.getpid()))\n{program}"
        )
        command = [
            str(Path(sys.executable).with_name("mpirun")),
            "-n",
            "2",
            *python,
            str(source),
            "train",
        ]
        command += [*ENDLESS, strategy, "--text", str(text), "--save", str(self.folder)]
        with self.log.open("w") as log:
            environment = clean_environment() | {MARK: self.mark}
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.pids = folder

    def wait_for(self, event: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not event():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def ends(self) -> str:
        """Check that the job ends at once, with nothing left of it but good checkpoints; return
        what it printed.
        """
        status = self.process.wait(timeout=60)
        output = self.log.read_text()
        assert status != 0, output
        deadline = time.monotonic() + 60
        while (left := members(self.process.pid, self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)  # the launcher does not wait for the last rank to be gone
        assert not left
        check_intact(self.folder)
        return output


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def started(program: str = PROGRAM, strategy: str = "ddp", python: Sequence[str] = ()) -> Job:
        jobs.append(Job(tmp_path, program, strategy, python or warm_python()))
        return jobs[-1]

    yield started
    for job in jobs:
        end_job(job.process.pid, job.mark, grace=0.5)
        job.process.wait()


def check_intact(folder: Path) -> None:
    """Read every checkpoint there is, as resuming would."""
    assert complete(folder)
    for path in complete(folder):
        restore.verify(path)
        assert tensors(path) and path.name == f"step-{restore.read_state(path)['step']:08d}"


def test_a_rank_that_is_killed_ends_the_job(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start()
    job.wait_for(lambda: len(complete(job.folder)) >= 2)
    os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
    job.ends()


def test_ctrl_c_ends_the_job(start: Callable[..., Job]) -> None:
    """A terminal sends SIGINT to all processes of the group it shows; ranks may be in groups of
    their own.
    """
    job = start(strategy="server", python=[sys.executable])
    job.wait_for(lambda: len(complete(job.folder)) >= 2)
    os.killpg(job.process.pid, signal.SIGINT)
    assert "Traceback" not in job.ends()


def test_a_rank_that_raises_ends_the_job_with_its_traceback(start: Callable[..., Job]) -> None:
    job = start(BUG + PROGRAM, "naive")
    output = job.ends()
    assert (
        "[rank 1] ZeroDivisionError: the bug of rank 1" in output and "[rank 1] Traceback" in output
    )
    assert "[rank 0]" not in output
    assert newest(job.folder).name in ("step-00000009", "step-00000010"), (
        "the last may not have been written yet"
    )


def test_ctrl_c_of_a_single_process(tmp_path: Path) -> None:
    """No traceback, and the status that shells use."""
    with (tmp_path / "log").open("w") as log:
        command = [
            sys.executable,
            "-m",
            "minidist",
            "train",
            *ENDLESS,
            "ddp",
            "--save",
            str(tmp_path / "run"),
        ]
        process = subprocess.Popen(command, env=clean_environment(), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while len(complete(tmp_path / "run")) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    output = (tmp_path / "log").read_text()
    assert output.endswith("minidist train: interrupted\n") and "Traceback" not in output
    check_intact(tmp_path / "run")


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """`| head -1` is no failure to complain about."""
    command = [
        sys.executable,
        "-m",
        "minidist",
        "train",
        *ENDLESS,
        "ddp",
        "--save",
        str(tmp_path / "run"),
    ]
    command += ["--log-every", "1"]
    with subprocess.Popen(
        command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout and process.stderr and process.stdout.readline()
            process.stdout.close()
            assert process.wait(timeout=60) == 141 and process.stderr.read() == b""
        finally:
            process.kill()


# ---------------------------------------------------------------- gradients that are no numbers


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_gradients_are_no_numbers_ends_and_keeps_its_checkpoints(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, folder = short_text(tmp_path), tmp_path / "run"
    words = [*TINY, "--text", str(text), "--lr", "1e20", "--clip", "0", "--warmup", "0"]
    words += ["--steps", "5", "--save-every", "1", "--save", str(folder)]
    assert minidist.run(lambda comm: train(words, comm), ranks=ranks, torch=True) == [2] * ranks
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "lower --lr" in said
    assert [path.name for path in complete(folder)] == ["step-00000001"]
