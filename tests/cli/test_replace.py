"""`launch --replace`: processes that are lost are replaced while the others wait, or go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import clean_environment, warm_environment, warm_python
from training import DEADLY_MEMBER, RUN, TINY, losses, short_text, tensors, train_on

from minidist.cli import launch
from minidist.full.checkpoint.store import newest
from minidist.full.launch.jobs import Outcome, run_job
from minidist.full.launch.replacing import run_replacing
from minidist.full.launch.restarts import Restarts

STEPS = 6


def words(home: Path, folder: str) -> list[str]:
    """Return the command line of a run."""
    run = RUN.replace("--save-every 1", "").split()
    return [
        *TINY,
        *run,
        "--steps",
        str(STEPS),
        "--text",
        str(short_text(home, 700)),
        "--save",
        str(home / folder),
    ]


def replacing(home: Path, program: str, *options: str) -> Outcome:
    """Run a job of two members that train."""
    (home / "program.py").write_text(program)
    launched = ["launch", "--replace", "-n", "2", *options, str(home / "program.py")]
    return run_job(
        [*warm_python(), "-m", "minidist", *launched, *words(home, "run")],
        env=warm_environment(),
        timeout=100,
        capture=True,
    )


def check(home: Path) -> None:
    """Compare the job with a run on a single rank that nothing happens to."""
    assert train_on(1, " ".join(words(home, "calm"))) == 0
    ours, theirs = (losses(home / run / "metrics.jsonl") for run in ("run", "calm"))
    assert [step for step, _ in ours] == list(range(1, STEPS + 1))
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-9)
    saved, expected = (tensors(newest(home / run)) for run in ("run", "calm"))
    for name, tensor in expected.items():
        assert torch.allclose(saved[name], tensor, rtol=1e-9, atol=1e-12), name


def test_a_killed_member_is_replaced_while_the_other_waits(tmp_path: Path) -> None:
    place = "import os\nprint('place', os.environ['LOCAL_RANK'], flush=True)\n"
    program = place + DEADLY_MEMBER.format(signal="SIGKILL")
    job = replacing(tmp_path, program, "--max-restarts", "1", "--min-ranks", "2")
    assert job.returncode == 0, job.stderr
    assert "member 1 is lost (status -9); member 2 is started, 0 more may be" in job.stderr
    assert "view 2: 2 ranks go on after step 2" in job.stdout
    assert "[2] place 1" in job.stdout, "it takes the lost one's place, and with it its GPU"
    check(tmp_path)


def test_a_member_that_hangs_is_ended_and_a_spare_takes_its_place(tmp_path: Path) -> None:
    """Where a machine is busy, the spare may have come first, and a view may end for nothing."""
    job = replacing(
        tmp_path, DEADLY_MEMBER.format(signal="SIGSTOP"), "--spares", "1", "--limit", "5"
    )
    assert job.returncode == 0, job.stderr
    assert re.search(r"member \d hangs: it is ended", job.stderr), job.stderr
    assert re.search(r"view \d: 2 ranks go on after step 2", job.stdout), job.stdout
    check(tmp_path)


def test_without_the_launcher_all_members_end(tmp_path: Path) -> None:
    log, text = tmp_path / "log", short_text(tmp_path, 700)
    train = [
        "-m",
        "minidist",
        "train",
        *TINY,
        "--steps",
        "100000",
        "--log-every",
        "1",
        "--text",
        str(text),
    ]
    command = [sys.executable, "-m", "minidist", "launch", "--replace", "-n", "2", *train]
    with log.open("w") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=out, env=clean_environment())
    while "step" not in log.read_text() and launcher.poll() is None:
        time.sleep(0.05)
    found = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True)
    members = [int(word) for word in found.stdout.split()]
    assert len(members) == 2
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 30
    try:
        while left := [pid for pid in members if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert "the launcher of this job is gone" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_nobody_is_started_in_a_job_that_was_asked_to_leave(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A warning ends members that are still starting; others in their place would not know of it."""
    outcome = run_replacing(
        [sys.executable, "-c", "import os; os.kill(os.getpid(), 10)"],
        clean_environment(),
        Restarts(2, most=3),
        timeout=60,
        warned={signal.SIGUSR1},
    )
    assert outcome.returncode == 128 + signal.SIGUSR1
    told = capsys.readouterr().err
    assert "too few are left" in told and "is started" not in told


def test_a_program_that_enters_no_view_is_refused(tmp_path: Path) -> None:
    job = replacing(tmp_path, "import minidist\nminidist.init()\n")
    assert job.returncode != 0
    assert re.search("does not enter views of the job .*: leave --replace out", job.stderr)


def test_what_is_wrong_for_all_is_told_once_and_no_rank_is_replaced(tmp_path: Path) -> None:
    """Ranks of a job that has come to its end with a fault are not lost."""
    wrong = "sys.exit(main(['train', *sys.argv[1:], '--nonsense', '3']))"
    program = f"import sys\nfrom minidist.__main__ import main\n{wrong}\n"
    job = replacing(tmp_path, program, "--max-restarts", "3")
    assert job.returncode == 2
    assert job.stderr.count("there is no option --nonsense") == 1 and "is lost" not in job.stderr


def test_options_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--spares", "1", "file.py"]) == 2
    assert "allow restarts with --max-restarts, or --replace" in capsys.readouterr().err
    assert launch.main(["--replace", "--wire", "mpi", "file.py"]) == 2
    assert "--replace starts ranks of gloo or NCCL by itself" in capsys.readouterr().err
