"""What MPICH shares between ranks in /dev/shm: no job leaves it behind, and where it has no room a
sentence says so.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from faults import Fault, run_to_its_end
from ranks import clean_environment, mpirun

from minidist.cli import doctor
from minidist.full.comm.mpi_wire import segment

SHOW = r"""
import pathlib, re, sys
maps = pathlib.Path("/proc/self/maps").read_text()
sys.stdout.write("".join(f"{name}\n" for name in set(re.findall(r"/dev/shm/mpich_shm_\w+", maps))))
sys.stdout.flush()
"""


def named(out: str) -> Path:
    """Return the one segment that all ranks mapped."""
    (name,) = set(re.findall(r"/dev/shm/mpich_shm_\w+", out))
    return Path(name)


@pytest.mark.parametrize(
    "ending", ("raise ValueError", "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)")
)
def test_a_job_under_a_bare_mpirun_leaves_no_segment_however_it_ends(
    ending: str, tmp_path: Path
) -> None:
    dies = f"\nif comm.rank == 1:\n    {ending}\ncomm.recv(one(), other)\n"
    ended = run_to_its_end(Fault(SHOW + dies), tmp_path)
    assert ended.status != 0 and not named(ended.out).exists()


def test_what_a_job_leaves_that_dies_before_all_ranks_have_started_is_removed() -> None:
    """The first rank makes the segment, and MPI has started on both when it dies."""
    die = (
        "\nif MPI.COMM_WORLD.rank == 0:\n    import os\n    os.kill(os.getpid(), 9)\nimport time; "
        "time.sleep(60)\n"
    )
    ended = mpirun(2, "from mpi4py import MPI\n" + SHOW + "MPI.COMM_WORLD.barrier()\n" + die)
    assert ended.returncode != 0 and not named(ended.stdout).exists()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, in which a dead job has left 5,000 bytes and a living one uses
    5,000.
    """
    monkeypatch.setattr(segment, "FOLDER", tmp_path)
    for name in ("mpich_shm_dead_0", "mpich_shm_alive_0", "another"):
        (tmp_path / name).write_bytes(b"x" * 5_000)
    return tmp_path


@pytest.mark.parametrize("way", ("mapped", "open"))
def test_a_segment_that_somebody_uses_stays(folder: Path, way: str) -> None:
    dead, alive = folder / "mpich_shm_dead_0", folder / "mpich_shm_alive_0"
    file = open(alive, "r+b")  # noqa: SIM115
    used = mmap.mmap(file.fileno(), 0) if way == "mapped" else file
    if way == "mapped":
        file.close()
    user = os.geteuid()
    assert segment.left_behind(user) == [dead]
    assert segment.left_behind(user, [dead]) == segment.left_behind(user + 1) == []
    used.close()
    assert segment.left_behind(user) == [alive, dead]


def test_doctor_counts_and_removes_what_dead_jobs_have_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("check_mpi", "check_torch"):
        monkeypatch.setattr(doctor, name, list)
    monkeypatch.setattr(doctor, "environment_report", str)  # which imports torch
    left = f"dead MPI jobs have left 2 segments in {folder}, 0.0 MB, which no process uses"
    assert doctor.main([]) == 0
    assert f"ok  {left}: python -m minidist doctor --clean removes them" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "ENOUGH_SHARED_MEMORY", 1 << 60)
    assert doctor.main([]) == 1
    assert f"!!  {left}\n    fix: python -m minidist doctor --clean" in capsys.readouterr().out
    assert doctor.main(["--clean"]) == 1
    said = capsys.readouterr().out
    assert "ok  removed 2 segments of dead MPI jobs, 0.0 MB" in said and left not in said
    assert [path.name for path in folder.iterdir()] == ["another"]


def in_a_small_folder(size: str, command: Sequence[str]) -> CompletedProcess[str]:
    """Run a command for which /dev/shm has this size."""
    mount = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"',
        "sh",
    ]
    if subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a /dev/shm of another size")
    environment = clean_environment()
    return subprocess.run(
        [*mount, *command], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(("size", "fits"), (("2m", False), ("3m", True)))
def test_a_dev_shm_too_small_for_mpi_is_a_sentence_and_no_bus_error(
    size: str, fits: bool, tmp_path: Path
) -> None:
    program = tmp_path / f"{secrets.token_hex(4)}.py"
    program.write_text("import minidist\nminidist.init().barrier()\nprint('met', flush=True)\n")
    launcher = str(Path(sys.executable).with_name("mpirun"))
    ended = in_a_small_folder(size, [launcher, "-n", "2", sys.executable, str(program)])
    assert (ended.returncode == 0, ended.stdout.count("met")) == (fits, 2 * fits), ended.stderr
    sentence = (
        "LaunchError: /dev/shm has 2.10 MB free, but MPI's own messages between 2 ranks need 2.11 "
        "MB there"
    )
    assert (sentence in ended.stderr) is not fits and "Bus error" not in ended.stderr
    assert fits or "docker run --shm-size=1g" in ended.stderr
