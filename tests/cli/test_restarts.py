"""Jobs that lose a rank: they start again by themselves, and train what an unbroken run trains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import clean_environment, mpirun, torchrun, warm_environment, warm_python
from training import DEADLY, RUN, TINY, losses, short_text, tensors, train_on

from minidist.cli import launch
from minidist.cli.train import going_on
from minidist.full.checkpoint.store import newest
from minidist.full.comm.errors import LaunchError
from minidist.full.comm.start import restarts
from minidist.full.comm.threads_wire.threads_wire import alone
from minidist.full.launch.jobs import Outcome, run_job
from minidist.full.launch.leaving import listening
from minidist.full.launch.restarts import Restarts, run_until_done
from minidist.full.trainer.flags import parse_with_notes
from minidist.further import Config

STEPS = 8


def words(home: Path, folder: str) -> list[str]:
    """Return the command line of a run that saves at every second step."""
    every = [*RUN.replace("--save-every 1", "--save-every 2").split(), "--steps", str(STEPS)]
    return [*TINY, *every, "--text", str(short_text(home, 700)), "--save", str(home / folder)]


def launched(program: Path, restarts: str, options: list[str]) -> Outcome:
    """Run a job of two ranks that may start again."""
    start = ["launch", "-n", "2", "--max-restarts", restarts, str(program), *options]
    return run_job(
        [*warm_python(), "-m", "minidist", *start],
        env=warm_environment(),
        timeout=100,
        capture=True,
    )


def check(home: Path, folder: str) -> None:
    """Compare a broken run with one on a single rank that nothing happens to."""
    assert train_on(1, " ".join(words(home, "calm"))) == 0
    (steps, found), (all_steps, expected) = (
        zip(*losses(home / run / "metrics.jsonl"), strict=True) for run in (folder, "calm")
    )
    assert steps == all_steps == tuple(range(1, STEPS + 1)), "each step is recorded once"
    assert found == pytest.approx(expected, rel=1e-9)
    ours, theirs = (tensors(newest(home / run)) for run in (folder, "calm"))
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-9, atol=1e-12), name


def test_a_job_goes_on_with_what_is_left(tmp_path: Path) -> None:
    program = tmp_path / "deadly.py"
    program.write_text(DEADLY)
    job = launched(program, "2", words(tmp_path, "run"))
    assert job.returncode == 0, job.stderr
    assert "restart 1 of at most 2, 1 ranks, on what is left" in job.stderr
    assert re.search("resumed after step [46]", job.stdout)
    check(tmp_path, "run")


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    """The newest one is damaged while the job is down."""
    damage = """
        folder = os.path.join(sys.argv[sys.argv.index("--save") + 1], "step-00000006")
        while not os.path.isdir(folder):
            time.sleep(0.01)
        with open(os.path.join(folder, "rank-0000.safetensors"), "r+b") as shard:
            shard.truncate(100)
"""
    kill = "        os.kill("
    program = tmp_path / "deadly.py"
    program.write_text(DEADLY.replace(kill, f"{damage}{kill}"))
    job = launched(program, "1", words(tmp_path, "run"))
    assert job.returncode == 0, job.stderr
    assert "is truncated or damaged" in job.stderr and "it is damaged-step-00000006" in job.stderr
    assert "resumed after step 4" in job.stdout
    check(tmp_path, "run")


@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=pytest.mark.soak)])
def test_torchruns_own_restarts_are_noticed(tmp_path: Path, rendezvous: str) -> None:
    options = words(tmp_path, "run")
    done = torchrun(2, DEADLY, *options, timeout=100, restarts=1, rendezvous=rendezvous)
    assert done.returncode == 0, done.stderr
    assert re.search("resumed after step [46]", done.stdout)
    check(tmp_path, "run")


def lost(*statuses: int) -> tuple[list[tuple[int, int]], object]:
    """Return a list of starts to come, and what starts a job that ends so each time."""
    starts: list[tuple[int, int]] = []

    def start(ranks: int, restart: int) -> Outcome:
        starts.append((ranks, restart))
        return Outcome(statuses[restart])

    return starts, start


@pytest.mark.parametrize(
    ("policy", "statuses", "expected"),
    [
        pytest.param(Restarts(4, 3), (9, 1, 0), [(4, 0), (3, 1), (2, 2)], id="less each time"),
        pytest.param(Restarts(4, 3, spares=1), (9, 9, 0), [(4, 0), (4, 1), (3, 2)], id="a spare"),
        pytest.param(Restarts(4, 1), (9, 9, 0), [(4, 0), (3, 1)], id="no restart left"),
        pytest.param(Restarts(2, 5, least=2), (9, 0), [(2, 0)], id="too few"),
        pytest.param(Restarts(8, 5, together=4), (9, 0), [(8, 0), (4, 1)], id="a whole replica"),
        pytest.param(Restarts(4, 5), (2,), [(4, 0)], id="wrong input stays wrong"),
        pytest.param(Restarts(4), (9,), [(4, 0)], id="nobody asked"),
    ],
)
def test_where_a_job_starts_again(
    policy: Restarts,
    statuses: tuple[int, ...],
    expected: list[tuple[int, int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    starts, start = lost(*statuses)
    outcome = run_until_done(start, policy)  # type: ignore[arg-type]
    assert starts == expected and outcome.returncode == statuses[len(starts) - 1]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(starts) - 1 + (policy.least > policy.ranks - 1 and len(starts) == 1)


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"--replica 4 does not divide 6 ranks.*use -n 4"):
        Restarts(6, 1, together=4)
    with pytest.raises(LaunchError, match=r"--min-ranks 5 are more than the 4 of -n"):
        Restarts(4, 1, least=5)


def test_who_counts_the_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert restarts() == 0
    monkeypatch.setenv("MINIDIST_RESTARTS", "0")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert restarts() == 2


def test_a_job_that_a_scheduler_has_started_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are not told that they run under SLURM, but how often it has started their launcher."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    options = launch._parser().parse_args(["-n", "4", __file__])
    assert launch.counts(options, 1)["MINIDIST_RESTARTS"] == "3"
    assert launch.member_command(options)[1]["MINIDIST_RESTARTS"] == "2"
    (tmp_path / "step-00000001").mkdir()
    config, _ = parse_with_notes(["--save", str(tmp_path)], Config)
    first_view: Any = SimpleNamespace(again=False)
    assert going_on(config, alone(), first_view).run.resume


# ---------------------------------------------------------------- a scheduler's warning

WARNED = """
import os, signal, sys
from minidist.__main__ import main
from minidist.full.trainer.loop import Trainer

plain = Trainer.step

def step(self, number, batch, rate):
    if number == 4 and self.comm.rank == self.comm.size - 1:
        os.kill(os.getpid(), signal.{name})
    return plain(self, number, batch, rate)

Trainer.step = step
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(("ranks", "name"), [(2, "SIGUSR1"), (1, "SIGTERM")])
def test_a_warned_run_saves_and_leaves(tmp_path: Path, ranks: int, name: str) -> None:
    options = words(tmp_path, "run")
    done = mpirun(ranks, WARNED.format(name=name), *options, timeout=100)
    assert done.returncode == 0, done.stderr
    by = name if ranks == 1 else "a signal to another rank"
    assert f"saved and left after step 5 of {STEPS}, as {by} asked" in done.stdout
    assert newest(tmp_path / "run").name == "step-00000005", "no checkpoint was due here"
    assert train_on(1, " ".join(options), "--resume") == 0
    check(tmp_path, "run")


def test_a_run_that_saves_nothing_ends_by_the_signal(tmp_path: Path) -> None:
    options = [*words(tmp_path, "run")[:-2], "--metrics", str(tmp_path / "metrics.jsonl")]
    every = options.index("--save-every")
    del options[every : every + 2]
    done = mpirun(1, WARNED.format(name="SIGTERM"), *options, timeout=100)
    assert done.returncode != 0 and "left after" not in done.stdout
    assert len(losses(tmp_path / "metrics.jsonl")) == 4


def test_a_second_warning_ends_the_rank() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with listening() as warned:
        assert not warned
        os.kill(os.getpid(), signal.SIGUSR1)
        assert warned.name == "SIGUSR1" and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == warned.hear
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize(
    ("launcher", "number"),
    [(["-n", "2"], signal.SIGUSR1), (["-n", "2", "--replace"], signal.SIGTERM)],
)
@pytest.mark.soak
def test_our_launcher_hands_a_warning_on(
    tmp_path: Path, launcher: list[str], number: signal.Signals
) -> None:
    options = [*words(tmp_path, "run"), "--steps", "100000", "--log-every", "1"]
    command = ["launch", "--max-restarts", "3", *launcher, "-m", "minidist", "train", *options]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", "minidist", *command],
            env=clean_environment(),
            stdout=log,
            stderr=log,
        )
    try:
        while not re.search("step +3/", (tmp_path / "log").read_text()) and job.poll() is None:
            time.sleep(0.05)
        job.send_signal(number)
        assert job.wait(60) == 0, (tmp_path / "log").read_text()
    finally:
        job.send_signal(signal.SIGINT)
    said = (tmp_path / "log").read_text()
    assert re.search(r"saved and left after step \d+ of 100000", said), said
    assert newest(tmp_path / "run") and "restart 1" not in said


# ---------------------------------------------------------------- disks

# Rank 0's disk has no room for the checkpoint of step 6, or takes its time, in the first start.
DISK = """
import os, resource, sys, time
from minidist.full.comm.start import restarts
from minidist.full.checkpoint import store

write, unlimited = store.write_shard, resource.getrlimit(resource.RLIMIT_FSIZE)

def write_shard(unfinished, rank, pieces):
    if unfinished.name.endswith("6") and rank == 0 and not restarts():
        {trouble}
    try:
        return write(unfinished, rank, pieces)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

if "--resume" not in sys.argv:
    store.write_shard = write_shard
"""


def test_a_full_disk_ends_a_job_with_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    """No rank is lost, and starting again would not help: the disk stays full."""
    program, options = tmp_path / "full.py", words(tmp_path, "run")
    full = "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))"  # bytes of a file
    program.write_text(DISK.format(trouble=full) + DEADLY.replace("number == 6", "False"))
    job = launched(program, "2", options)
    assert job.returncode == 2 and "restart 1" not in job.stderr
    assert len(job.stderr.splitlines()) == 1 and "cannot be written" in job.stderr
    assert newest(tmp_path / "run").name == "step-00000004"
    assert not list((tmp_path / "run").glob(".unfinished*"))
    again = launched(program, "0", [*options, "--resume"])
    assert again.returncode == 0 and "resumed after step 4" in again.stdout, again.stderr
    check(tmp_path, "run")


@pytest.mark.soak
def test_what_a_slow_disk_has_not_written_yet_is_trained_again(tmp_path: Path) -> None:
    """A rank is killed while the checkpoint of step 6 is on its way."""
    program = tmp_path / "slow.py"
    program.write_text(DISK.format(trouble="time.sleep(30)") + DEADLY)
    job = launched(program, "1", words(tmp_path, "run"))
    assert job.returncode == 0, job.stderr
    assert "resumed after step 4" in job.stdout
    assert not list((tmp_path / "run").glob(".unfinished*"))
    check(tmp_path, "run")
