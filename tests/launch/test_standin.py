"""A fork in a stand-in's place is what the launcher started: what it may use, where it stands, how
it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import clean_environment

from minidist.full.launch.standin import STAND_IN

HOST = """
import socket, sys
from minidist.full.launch.standin import fork_ranks
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("ranks")
    listener.listen()
    print("listening", flush=True)
    told = fork_ranks(listener, 2, lambda others: None)
if told is not None:
    exec(told[0])
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    options = {"cwd": tmp_path, "env": clean_environment(), "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOST], **options) as process:
        assert process.stdout.readline() == "listening\n"
        yield process
        process.kill()


def stand_in(folder: Path, program: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", "-c", STAND_IN, "../ranks", program]
    (folder / "here").mkdir(exist_ok=True)
    return subprocess.Popen(
        command, cwd=folder / "here", stdout=subprocess.PIPE, text=True, **options
    )


def test_a_fork_has_what_its_launcher_gave_and_its_status_is_the_launchers(
    host: subprocess.Popen[str], tmp_path: Path
) -> None:
    said, ours = os.pipe()
    program = (
        f"import os; os.write({ours}, b'here'); print(os.getcwd(), os.environ['RANK'], 'HOME' in "
        "os.environ)"
    )
    first = stand_in(tmp_path, program + "; sys.exit(3)", env={"RANK": "5"}, pass_fds=[ours])
    second = stand_in(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert first.communicate()[0] == f"{tmp_path / 'here'} 5 False\n"
    assert os.read(said, 4) == b"here"
    assert (first.wait(), second.wait(), host.wait()) == (3, -9, 0)
    os.close(said), os.close(ours)


def test_a_fork_whose_stand_in_is_killed_is_ended(
    host: subprocess.Popen[str], tmp_path: Path
) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    both = [stand_in(tmp_path, program) for _ in range(2)]
    forked = [int(each.stdout.readline()) for each in both]
    assert all(each.poll() is None for each in both)
    for each in both:
        each.kill()
        each.communicate()
    assert host.wait() == 0, "it waits for its forks"
    assert not any(Path(f"/proc/{pid}").exists() for pid in forked)
