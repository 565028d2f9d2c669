"""`launch` inside a SLURM job: a real one, of three machines that are this one under other names."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import clean_environment, free_port
from training import RUN, TINY, losses, short_text, train_on

from minidist.cli import launch
from minidist.full.comm.errors import LaunchError
from minidist.full.launch.allocation import Allocation, allocation_here, run_on_machines
from minidist.full.launch.jobs import Outcome
from minidist.full.launch.restarts import Restarts

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmUser=root
SlurmdUser=root
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/%n
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/%n.log
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/%n.pid
MpiDefault=none
KillWait=10
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# Ranks die on n2, in each start.
PROGRAM = """
import os, signal, sys
from minidist.__main__ import main
from minidist.full.comm.start import restarts
from minidist.full.trainer.loop import Trainer

plain, here = Trainer.step, os.environ["SLURMD_NODENAME"]

def step(self, number, batch, rate):
    loss = plain(self, number, batch, rate)
    if number == 2 + restarts() and here == "n2":
        os.kill(os.getpid(), signal.SIGKILL)
    return loss

Trainer.step = step
sys.exit(main(["train", *sys.argv[1:]]))
"""
STEPS = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start SLURM; give the environment in which its commands find it."""
    if shutil.which("slurmctld") is None or os.getuid() != 0:
        pytest.skip(
            "there is no slurmctld here, or it may not be started: apt-get install slurm-wlm"
        )
    home, host, port = tmp_path_factory.mktemp("slurm"), socket.gethostname(), free_port()
    config = home / "slurm.conf"
    first = free_port() // 10 * 10
    ports = {"port": port, "first": first, "last": first + 2}
    config.write_text(CONFIG.format(home=home, host=host.partition(".")[0], **ports))
    env = clean_environment() | {"SLURM_CONF": str(config)}
    (home / "state").mkdir()
    daemons = [["slurmctld", "-D", "-f", str(config)]]
    for node in ("n1", "n2", "n3"):
        (home / node).mkdir()
        daemons.append(["slurmd", "-D", "-N", node, "-f", str(config)])
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
    running = [subprocess.Popen(words, **quiet) for words in daemons]  # type: ignore[call-overload]
    try:
        for _ in range(500):
            said = subprocess.run(["sinfo", "-h"], env=env, capture_output=True, text=True).stdout
            if "3   idle" in said:
                break
            time.sleep(0.2)
        else:
            pytest.fail(
                f"SLURM does not start: {said}{(home / 'slurmctld.log').read_text()[-2000:]}"
            )
        yield env
    finally:
        for daemon in running:
            daemon.terminate()
        for daemon in running:
            daemon.wait(20)


def test_a_machine_that_fails_twice_is_left_out(cluster: dict[str, str], tmp_path: Path) -> None:
    options = RUN.replace("--save-every 1", "--save-every 2").split()
    words = [*TINY, *options, "--steps", str(STEPS), "--text", str(short_text(tmp_path, 700))]
    (tmp_path / "program.py").write_text(PROGRAM)
    start = [sys.executable, "-m", "minidist", "launch", "-n", "2", "--max-restarts", "4"]
    command = [*start, str(tmp_path / "program.py"), *words, "--save", str(tmp_path / "run")]
    env = cluster | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # as in a script of sbatch, whose end takes SLURM ten seconds to tell
    done = subprocess.run(
        ["salloc", "--nodes=2", "--ntasks-per-node=1", *command],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    said = done.stderr
    assert done.returncode == 0, said + done.stdout
    told = re.findall(r"^minidist launch: (.*)$", said, re.M)
    assert told == [
        "the job has lost a rank on n2",
        "restart 1 of at most 4, 2 ranks on n1 n2",
        "the job has lost a rank on n2 for the second time: it is left out",
        "restart 2 of at most 4, 1 ranks on n1",
    ], said
    assert train_on(1, " ".join([*words[len(TINY) :], "--save", str(tmp_path / "calm")])) == 0
    ours, theirs = (losses(tmp_path / run / "metrics.jsonl") for run in ("run", "calm"))
    assert [step for step, _ in ours] == list(range(1, STEPS + 1))
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-9)


def test_a_warning_comes_to_ranks_that_srun_has_started(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    text, log = short_text(tmp_path, 700), tmp_path / "log"
    train = ["-m", "minidist", "train", *TINY, "--steps", "100000", "--log-every", "1"]
    saved = ["--text", str(text), "--save", str(tmp_path / "run")]
    start = [sys.executable, "-m", "minidist", "launch", "-n", "2", "--limit", "77", *train, *saved]
    told = f"echo $$ > {tmp_path / 'pid'}; exec {' '.join(start)}"
    env = cluster | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with log.open("w") as out:
        job = subprocess.Popen(
            ["salloc", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", told],
            env=env,
            cwd=tmp_path,
            stdout=out,
            stderr=out,
        )
    try:
        while not re.search("step +3/", log.read_text()) and job.poll() is None:
            time.sleep(0.1)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGUSR1)
        assert job.wait(60) == 0, log.read_text()[-2000:]
    finally:
        job.terminate()
    assert re.search(r"saved and left after step \d+ of 100000", log.read_text())


def test_spares_of_a_slurm_job_are_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "allocation_here", lambda ranks: Allocation(["n1", "n2"], 1, "7"))
    program = tmp_path / "program.py"
    program.write_text("")
    assert launch.main(["--max-restarts", "1", "--spares", "1", str(program)]) == 2
    assert "ask for more --nodes, and leave --spares out" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert launch.main(["--replace", str(program)]) == 2
    assert "starts all ranks on this machine, and the SLURM job has 2" in capsys.readouterr().err
    assert launch.main(["nowhere.py"]) == 2
    assert "there is no file nowhere.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "blamed"),
    [
        ("srun: error: n2: task 1: Killed", "n2"),
        ("srun: error: n2: tasks 1-3: Exited with exit code 1", "n2"),
        ("srun: error: Node failure on n2", "n2"),
        ("srun: error: n2: task 0: Terminated", ""),
        ("srun: error: Unable to create step for job 3", ""),
        ("slurmstepd-n2: error: *** STEP 2.0 ON n1 CANCELLED ***", ""),
        ("[n2] srun: error: n2: task 1: Killed", ""),
        ("srun: error: n9: task 1: Killed", ""),
        ("srun: error: n[2-3]: tasks 1-2: Killed", "n2 n3"),
        ("srun: error: n[2-3]: tasks 1-2: Exited with exit code 1", ""),
    ],
)
def test_who_is_blamed(
    line: str, blamed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$3" = "n[2-3]" ] && echo n2 n3\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    allocation = Allocation(["n1", "n2", "n3"], 1, "7")
    allocation.hear(line + "\n")
    allocation.hear("srun: error: n1: task 0: Terminated\n")
    assert allocation.blamed == blamed.split()


def test_who_was_killed_is_blamed_before_who_misses_it() -> None:
    allocation = Allocation(["n1", "n2", "n3"], 1, "7")
    for line in ("n1: task 0: Exited with exit code 1", "n2: task 1: Killed", "n3: task 2: Killed"):
        allocation.hear(f"srun: error: {line}\n")
    assert allocation.blamed == ["n2"]


def test_a_machine_that_is_left_over_comes_first() -> None:
    allocation = Allocation(["n1", "n2", "n3", "n4"], 2, "7")
    victims, places = iter(["n2", "n4", "n2", ""]), []

    def start(nodes: list[str], ranks: int, restart: int) -> Outcome:
        places.append(nodes)
        victim = next(victims)
        allocation.hear(f"srun: error: {victim}: tasks 0-1: Killed")
        return Outcome(137 if victim else 0)

    assert run_on_machines(start, allocation, Restarts(6, 9)).returncode == 0
    assert places == [
        ["n1", "n2", "n3"],
        ["n1", "n3", "n4"],
        ["n1", "n3", "n2"],
        ["n1", "n3", "n4"],
    ]


def test_a_job_ends_when_too_few_machines_are_fit(capsys: pytest.CaptureFixture[str]) -> None:
    allocation, starts = Allocation(["n1", "n2", "n3"], 4, "7"), []

    def start(nodes: list[str], ranks: int, restart: int) -> Outcome:
        starts.append((*nodes, ranks))
        allocation.hear(f"srun: error: {nodes[-1]}: task 1: Killed")
        return Outcome(137)

    outcome = run_on_machines(start, allocation, Restarts(12, 9, least=8, together=4))
    assert outcome.returncode == 137
    assert starts == [
        ("n1", "n2", "n3", 12),
        ("n1", "n2", "n3", 12),
        ("n1", "n2", 8),
        ("n1", "n2", 8),
    ]
    assert "4 ranks are left, fewer than --min-ranks 8" in capsys.readouterr().err


def test_what_does_not_fit_the_job_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert allocation_here(4) is None
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho n1; echo n2\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"JOB_NUM_NODES": "2", "JOB_ID": "7", "NTASKS_PER_NODE": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = allocation_here(4)
    assert found == Allocation(["n1", "n2"], 4, "7")
    with pytest.raises(LaunchError, match="-n 6 does not fill machines of 4 ranks"):
        allocation_here(6)
    with pytest.raises(LaunchError, match="-n 12 needs 3 machines of 4 ranks, and the job has 2"):
        allocation_here(12)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert allocation_here(4) is None, "srun has started this already"
