"""`launch` and `doctor`: the right mpirun, marked lines, an exit status, and no process left
behind.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from ranks import clean_environment, warm_environment, warm_python

from minidist.cli import doctor, launch
from minidist.full.comm.errors import LaunchError
from minidist.full.comm.start import launched_rank
from minidist.full.comm.torch_wire import gpus
from minidist.full.launch import mpirun
from minidist.full.launch.jobs import MARK, Outcome, members, run_job, running
from minidist.full.launch.marked_output import MarkedLines

OPEN_MPI = "mpirun (Open MPI) 5.0.6"


def start(*arguments: str, timeout: float = 60, **extra: str) -> Outcome:
    """Run `python -m minidist` with these arguments."""
    command = [sys.executable, "-m", "minidist", *arguments]
    return run_job(command, env=clean_environment() | extra, timeout=timeout, capture=True)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that does what its first argument says."""
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent("""
            import os, signal, subprocess, sys, time
            import minidist
            comm = minidist.init()
            task = sys.argv[1]
            if task == "say":
                for k in range(200):
                    print("x" * 50, sys.argv[2:], os.environ["OMP_NUM_THREADS"])
                print(f"no end of line from {comm.rank} of {comm.size} on {comm.wire.kind}", end="")
            if task == "fail" and comm.rank == 1:
                raise ValueError("boom")
            if task == "status":
                sys.exit(3)
            if task == "wait":
                import numpy
                comm.recv(numpy.empty(3), 1 - comm.rank)
            if task == "rest":
                print("up", flush=True)
                time.sleep(600)
            if task == "stay":  # also a process that has left the job's session, and ends for nobody
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
                subprocess.Popen([sys.executable, "-c", stubborn, sys.argv[2]], start_new_session=True)
                print("up", flush=True)
                time.sleep(600)
        """)
    )
    return path


def left_over(token: str) -> list[str]:
    """Return the command lines of processes that bear `token`."""
    table = subprocess.run(
        ["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True
    ).stdout
    return [line for line in table.splitlines() if token in line]


def test_lines_are_marked_and_whole(program: Path) -> None:
    job = start("launch", "-n", "3", str(program), "say", "a", "--b")
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    for rank in range(3):
        assert lines.count(f"[{rank}] {'x' * 50} ['a', '--b'] 1") == 200
        assert f"[{rank}] no end of line from {rank} of 3 on mpi" in lines
    assert len(lines) == 3 * 201


def test_a_progress_bar_is_seen_before_its_line_ends() -> None:
    reader, writer = os.pipe()
    with MarkedLines(writer, "3") as marked:
        for part in ("\r 1%", "\r", " 2%", "\r", "\n", "whole\r\n", "rest"):
            marked.write(part.encode())
        seen = os.read(reader, 1000)
    assert seen == b"[3] \r[3]  1%\r[3]  2%\r\n[3] whole\r\n"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_daemon_may_have_closed_its_streams(program: Path, closed: str, tmp_path: Path) -> None:
    command = f'"{sys.executable}" -m minidist launch -n 2 "{program}" status'
    job = subprocess.run(
        ["sh", "-c", f"{command} {closed}; echo $? > status"],
        cwd=tmp_path,
        env=clean_environment() | {"PYTHONPATH": str(Path(launch.__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "status").read_text() == "3\n"
    assert "Traceback" not in job.stderr


def test_what_another_launcher_has_left_is_not_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "MINIDIST_MEMBER", "MINIDIST_STORE", "MINIDIST_WANTED"):
        monkeypatch.setenv(name, "3")
    assert not [name for name in mpirun.environment() if name.startswith("MINIDIST_")]
    monkeypatch.setenv("MINIDIST_MEMBER", "1")
    assert launched_rank() == "1", "which launch --replace sets, and leaves RANK alone"


def test_a_traceback_shows_the_program_alone(program: Path) -> None:
    job = start("launch", "-n", "2", str(program), "fail")
    assert job.returncode == 1
    traceback = [line for line in job.stderr.splitlines() if line.startswith("[rank 1]")]
    assert traceback[0] == "[rank 1] Traceback (most recent call last):"
    assert traceback[-1] == "[rank 1] ValueError: boom"
    assert sum("File " in line for line in traceback) == 1


@pytest.mark.parametrize("wire", ["mpi", "torch"])
def test_the_exit_status_is_the_jobs(program: Path, wire: str) -> None:
    job = start("launch", "-n", "2", "--wire", wire, str(program), "status")
    assert job.returncode == 3
    assert "Traceback" not in job.stderr


def test_no_python_runs_in_a_fork_of_the_process_that_starts_a_job() -> None:
    """It would begin by freeing what other threads have, and a process group of gloo among that
    waits for ever.
    """
    program = """
        import os, sys, time
        from minidist.full.launch.jobs import run_job
        os.register_at_fork(after_in_child=lambda: time.sleep(60))
        said = run_job(["sh", "-c", "echo here; exit 3"], capture=True)
        print(said.returncode, said.stdout, run_job(["/no/such/program"], capture=True).stderr)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    missing = "/no/such/program cannot be started: No such file or directory"
    assert done.stdout == f"3 here\n {missing}\n\n", done.stderr


def test_a_module_can_be_the_program() -> None:
    job = start("launch", "-n", "2", "--", "-m", "platform")
    assert job.returncode == 0
    assert sorted(line[:3] for line in job.stdout.splitlines()) == ["[0]", "[1]"]


def test_no_rank_is_started_for_a_program_that_is_no_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the job would start again, and machines be left out that are fit."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text('print("\\d")\ndef f(:\n')
    assert launch.main(["--max-restarts", "3", str(wrong)]) == 2
    told = capsys.readouterr().err
    assert told == f"minidist launch: {wrong} is not Python: invalid syntax (wrong.py, line 2)\n"


def test_a_limit_brings_the_report(program: Path) -> None:
    job = start("launch", "-n", "2", "--limit", "1", str(program), "wait")
    assert job.returncode == 1
    assert "Who waits for whom" in job.stderr


def test_a_timeout_leaves_nothing_behind(program: Path) -> None:
    token = secrets.token_hex(8)
    job = start("launch", "-n", "2", "--timeout", "10", str(program), "stay", token)
    assert job.returncode == 124
    assert job.stdout.count("up") == 2
    assert "ended after 10 s, as --timeout says" in job.stderr
    assert not left_over(token)


@pytest.mark.parametrize(
    ("task", "numbers", "status"),
    [
        ("stay", [signal.SIGINT], 130),
        ("stay", [signal.SIGTERM], 143),
        ("stay", [signal.SIGHUP], 129),
        pytest.param("stay", [signal.SIGINT, signal.SIGINT], 130, id="Ctrl-C twice"),
        pytest.param(
            "rest",
            [signal.SIGKILL],
            -9,
            id="killed",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells mpirun"),
        ),
    ],
)
def test_a_signal_leaves_nothing_behind(
    program: Path, task: str, numbers: list[signal.Signals], status: int
) -> None:
    token = secrets.token_hex(8)
    launch = ["launch", "-n", "2", "--grace", "1", str(program), task, token]
    process = subprocess.Popen(
        [sys.executable, "-m", "minidist", *launch],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Under `nohup` these tests ignore SIGHUP, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert b"up" in process.stdout.readline()
    assert b"up" in process.stdout.readline()
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.3 if len(numbers) > 1 else 0)
    assert process.wait(20) == status
    for _ in range(200):  # who was killed itself has not waited for the others
        if status > 0 or not left_over(token):
            break
        time.sleep(0.1)
    assert not left_over(token)
    process.stdout.close()


def test_a_warning_is_for_ranks_and_not_for_torchrun() -> None:
    words = ["-m", "asyncio", "some.words"]  # a prompt, which waits for its input
    sleeps = "import time; time.sleep(60)"
    jobs = [
        subprocess.Popen([sys.executable, *before, *words], stdin=subprocess.PIPE)
        for before in (["-u"], ["-c", sleeps], ["-c", sleeps, "--nproc-per-node", "2"])
    ]
    try:
        assert running("asyncio") == {jobs[0].pid}
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


def test_a_warning_that_no_rank_can_hear_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be lost, and the job would train on until it is killed."""
    monkeypatch.setattr(launch, "running", lambda name: set())
    options = argparse.Namespace(warnings=set(), grace=1.0)
    with pytest.raises(SystemExit) as ended:
        launch.warn(options, signal.SIGUSR1)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert "SIGUSR1 has come while no rank runs" in capsys.readouterr().err


def test_torch_is_launched_the_same_way(program: Path) -> None:
    command = ["launch", "-n", "2", "--wire", "torch", str(program), "say"]
    start = [*warm_python(), "-m", "minidist", *command]
    job = run_job(start, env=warm_environment(), timeout=100, capture=True)
    assert job.returncode == 0, job.stderr
    assert "[1] no end of line from 1 of 2 on torch" in job.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2", "missing.py"], "there is no file missing.py"),
        (["-n", "0", "x.py"], "must be from 1 to 10,000"),
        (["-n", "2"], "name a program"),
        (["-n", "2", "--ranks-per-gpu", "0", "x.py"], "must be from 1 to 10,000"),
        (
            ["-n", "2", "--ranks-per-gpu", "2", "--wire", "mpi", __file__],
            "torchrun starts: leave --wire mpi out",
        ),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = launch.main(arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert words in capsys.readouterr().err


def test_ranks_that_cannot_share_gpus_are_not_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for count, each, words in (
        (0, "2", "has no GPU"),
        (1, "1", "for 1 of the 2 ranks"),
        (1, "2", "this is 2.29.7"),
    ):
        monkeypatch.setattr(gpus, "count_gpus", lambda count=count: count)
        monkeypatch.setattr(gpus, "nccl_version", lambda: (2, 29, 7))
        assert launch.main(["-n", "2", "--ranks-per-gpu", each, __file__]) == 2
        said = capsys.readouterr().err
        assert (
            said.startswith(f"minidist launch: --ranks-per-gpu {each}")
            and words in said
            and said.count("\n") == 1
        )


def test_ranks_that_share_gpus_are_started_by_torchrun_and_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "share_gpus", lambda each, gpus, ranks: None)
    options = launch._parser().parse_args(
        ["-n", "4", "--ranks-per-gpu", "4", "--limit", "9", __file__, "--x"]
    )
    command, env = launch.command_line(options)
    assert command[1:5] == ["-c", mpirun.TORCHRUN, "--nproc-per-node", "4"]
    assert command[-2:] == [__file__, "--x"]
    assert (env["MINIDIST_RANKS_PER_GPU"], env["MINIDIST_LIMIT"]) == ("4", "9.0")
    alone, env = launch.command_line(launch._parser().parse_args(["-n", "4", __file__]))
    assert mpirun.TORCHRUN not in alone and "MINIDIST_RANKS_PER_GPU" not in env


# -------------------------------------------------------------------- which mpirun


def fake_mpirun(folder: Path, says: str) -> Path:
    """Write an mpirun that only says what it is."""
    folder.mkdir(exist_ok=True)
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("says", "whose"),
    [
        (OPEN_MPI, "Open MPI"),
        ("HYDRA build details: Version: 4.2", "MPICH"),
        ("MPICH Version: 5.0.2", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "Intel MPI"),
        ("usage: mpirun", "an unknown MPI"),
    ],
)
def test_vendors_are_recognised(says: str, whose: str) -> None:
    assert mpirun.vendor(says) == whose


def test_another_ones_mpirun_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = mpirun.mpi_library()
    says = OPEN_MPI if mpirun.vendor(library) != "Open MPI" else "HYDRA build details"
    fake = fake_mpirun(tmp_path / "bin", says)
    right = mpirun.find_mpirun()
    assert mpirun.vendor(right.version) == mpirun.vendor(right.library) == right.vendor

    monkeypatch.setattr(mpirun, "candidates", lambda: [str(fake), right.path])
    assert mpirun.find_mpirun() == right

    monkeypatch.setattr(mpirun, "candidates", lambda: [str(fake)])
    with pytest.raises(
        LaunchError, match=rf"no mpirun of {right.vendor} was found \({fake} is .*'s\): pip install"
    ):
        mpirun.find_mpirun()


def test_no_mpi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "ASK_LIBRARY", "raise ModuleNotFoundError('no mpi4py')")
    with pytest.raises(
        LaunchError, match=r"mpi4py cannot be used \(ModuleNotFoundError: no mpi4py\): pip install"
    ):
        mpirun.find_mpirun()


@pytest.mark.parametrize(
    "names", [("PMI_SIZE", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")]
)
def test_ranks_of_another_ones_mpirun_notice(tmp_path: Path, names: tuple[str, str]) -> None:
    """What such an mpirun leaves behind: variables that name 4 ranks, and an MPI that sees only
    itself.
    """
    path = tmp_path / "program.py"
    path.write_text("import minidist\nminidist.init()\n")
    job = run_job(
        [sys.executable, str(path)],
        env=clean_environment() | dict(zip(names, "41", strict=True)),
        capture=True,
    )
    assert job.returncode != 0
    assert "LaunchError: mpirun started 4 processes, but this Python speaks" in job.stderr
    assert "python -m minidist launch -n 4" in job.stderr


def test_open_mpi_gets_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("SLURM_NTASKS", "64")
    env = mpirun.environment(mpirun.Mpirun("mpirun", "Open MPI", "Open MPI v5.0.6", OPEN_MPI))
    assert env["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert env["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert env["OMP_NUM_THREADS"] == "7", "what the user has set stays"
    assert "SLURM_NTASKS" not in env, "ranks belong to the launcher that starts them"


# -------------------------------------------------------------------- doctor


def test_doctor_finds_everything_well() -> None:
    job = start("doctor", timeout=100)  # It asks torch, which starts a dozen programs.
    assert job.returncode == 0, job.stdout
    said, _, report = job.stdout.partition(
        "\n\nwhat torch says of this machine, for whoever is asked for help:\n"
    )
    lines = said.splitlines()
    assert all(line.startswith("ok  ") for line in lines[:-1])
    for words in (
        "Python 3.",
        " cores: ",
        "shared memory",
        "MPI: ",
        "two MPI ranks: met",
        "two gloo ranks",
        "GPUs: ",
    ):
        assert any(words in line for line in lines), words
    assert lines[-1] == "all is well"
    assert (
        f"PyTorch version: {torch.__version__}" in report
        and "Versions of relevant libraries:" in report
    )


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "import no_such_module",
            "gave no report (status 1): ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("import time; time.sleep(60)", "gave no report (status 124): "),
        ("", "gave no report (status 0): it said nothing"),
    ],
)
def test_doctor_says_so_where_torch_gives_no_report(
    program: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "REPORT", program)
    monkeypatch.setattr(doctor, "PATIENCE", 0.4 if "sleep" in program else 60.0)
    assert words in doctor.environment_report()


def test_doctor_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_mpirun(tmp_path / "bin", "mpirun of nobody")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(doctor, "check_torch", list)
    monkeypatch.setattr(doctor, "REPORT", "print('versions')")
    monkeypatch.setattr(doctor, "TWO_RANKS", "import sys; sys.stdout.write('alone\\n')")
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert (
        f"!!  mpirun: {tmp_path}/bin/mpirun comes first on PATH, but belongs to an unknown MPI"
        in said
    )
    assert "!!  two MPI ranks: status 0, they said: alone; alone" in said
    assert "\n2 to fix\n" in said and said.endswith("for whoever is asked for help:\nversions\n")


@pytest.mark.parametrize(
    ("nccl", "lines"),
    [
        ([], ["!!  GPUs: 2 x H100, but this torch has no NCCL"]),
        (
            ["2.28.9", "/venv/libnccl.so.2", "needs NCCL 2.30"],
            ["ok  ranks a GPU: one; more needs NCCL 2.30"],
        ),
        (
            ["2.30.7", "/x/libnccl.so.2", ""],
            ["NCCL 2.30.7 is /x/libnccl.so.2", "ok  ranks a GPU: several, as MINIDIST_"],
        ),
    ],
)
def test_doctor_says_how_many_ranks_a_gpu_may_have(
    monkeypatch: pytest.MonkeyPatch, nccl: list[str], lines: list[str]
) -> None:
    said = json.dumps(["2.13", "works", ["H100", "H100"], *nccl])
    monkeypatch.setattr(doctor, "run_job", lambda *_, **options: Outcome(0, stdout=said))
    found = "\n".join(f"{'!!' if fix else 'ok'}  {what}" for what, fix in doctor.check_torch())
    assert all(line in found for line in lines), found


def test_what_doctor_asks_of_nccl_can_be_answered(tmp_path: Path) -> None:
    """The same program, where torch says that there are a GPU and NCCL."""
    pretend = """
    import torch, torch.distributed
    torch.cuda.device_count, torch.cuda.get_device_name = lambda: 1, lambda number: f"GPU {number}"
    torch.distributed.is_nccl_available, torch.cuda.nccl.version = lambda: True, lambda: (2, 28, 9)
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(pretend) + doctor.TORCH)
    command = [*warm_python(), str(path), str(tmp_path / "meeting")]
    job = run_job(command, env=clean_environment(), timeout=60, capture=True)
    assert job.returncode == 0, job.stderr
    _, gloo, found, version, library, fault = json.loads(job.stdout.splitlines()[-1])
    assert (gloo, found, version, library) == ("works", ["GPU 0"], "2.28.9", "torch itself")
    assert fault.startswith("needs NCCL 2.30 or newer, but this is 2.28.9: pip install --target")


# -------------------------------------------------------------------- jobs


def test_a_job_is_found_by_its_parents_where_there_is_no_proc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nested = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(60)'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{nested}; print(1, flush=True); time.sleep(60)"], stdout=-1
    )
    assert process.stdout is not None
    process.stdout.readline()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    job = members(process.pid, "no mark")
    assert process.pid in job
    assert len(job) == 2
    for pid in job:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_job_bears_its_mark() -> None:
    job = run_job([sys.executable, "-c", f"import os; print(os.environ['{MARK}'])"], capture=True)
    assert job.returncode == 0
    assert not members(-1, job.stdout.strip())
