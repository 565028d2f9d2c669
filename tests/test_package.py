"""The zip for Gradescope, unpacked as their documentation lays it out, and run by somebody without
rights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from ranks import clean_environment
from test_grade import HONEST, LESSON

import minidist
from minidist.__main__ import main
from minidist.course.package import package

SITE = Path(numpy.__file__).parents[1]
NOBODY: dict[str, Any] = (
    {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
)


def usable_python() -> str:
    """Return an interpreter of this version that anybody may run: that of a root's home is not."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for name in (getattr(sys, "_base_executable", ""), f"/usr/bin/python{version}"):
        try:
            ran = subprocess.run(
                [name, "-c", f"import os; os.listdir({str(SITE)!r})"], capture_output=True, **NOBODY
            )
        except OSError:
            continue
        if ran.returncode == 0:
            return name
    pytest.skip(f"nobody else may run a Python {version} here, or read {SITE}")


@pytest.fixture
def autograder() -> Iterator[Path]:
    """Lay out /autograder, in another place: what setup.sh installs is replaced by what is
    installed here.
    """
    python = usable_python()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        zipped = package(LESSON, root / "autograder.zip", seed=3)
        with zipfile.ZipFile(zipped) as file:
            file.extractall(root / "source")
        shutil.copy(root / "source" / "run_autograder", root / "run_autograder")
        (root / "run_autograder").chmod(0o755)
        environment = root / "source" / ".venv"
        subprocess.run([python, "-m", "venv", "--without-pip", str(environment)], check=True)
        packages = next(environment.glob("lib/*/site-packages"))
        packages.rmdir()
        packages.symlink_to(SITE)
        for pattern in (
            "lib/lib*.so*",
            "lib/mpich",
            "bin/mpi*",
            "bin/hydra*",
        ):  # which wheels put beside the interpreter
            for path in Path(sys.prefix).glob(pattern):
                os.symlink(path, environment / path.relative_to(sys.prefix))
        (root / "results").mkdir()
        if NOBODY:
            shutil.chown(root / "results", "nobody", "nogroup")
        yield root


def run(root: Path, answer: str, **who: Any) -> dict[str, Any]:
    (root / "submission").mkdir(exist_ok=True)
    (root / "submission" / "exercise.py").write_text(answer)
    command = ["bash", str(root / "run_autograder")]
    ran = subprocess.run(
        command,
        cwd="/",
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        **who,
    )
    assert ran.returncode == 0, ran.stderr
    results: dict[str, Any] = json.loads((root / "results" / "results.json").read_text())
    return results


def test_an_unprivileged_user_grades_with_it(autograder: Path) -> None:
    results = run(autograder, HONEST, **NOBODY)
    assert results["score"] == 100, [
        results["output"],
        *(test["output"] for test in results["tests"]),
    ]
    wanted = {"name", "number", "score", "max_score", "status", "output", "visibility"}
    assert all(set(test) == wanted for test in results["tests"])
    assert {test["visibility"] for test in results["tests"]} == {"visible", "hidden"}
    board = {row["name"]: row["value"] for row in results["leaderboard"]}
    assert board["points"] == 100 and board["messages sent"] > 100 and board["bytes sent"] > 1000
    stub = run(autograder, (LESSON.folder / "exercise.py").read_text(), **NOBODY)
    assert stub["score"] == 0 and stub["leaderboard"] == [
        {"name": "points", "value": 0, "order": "desc"}
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run code as somebody else")
def test_a_student_s_code_may_not_write_what_the_grader_writes(autograder: Path) -> None:
    """As Gradescope does, root runs it, and the student's code runs as another user."""
    script = autograder / "run_autograder"
    script.write_text(script.read_text().replace("--user student", "--user nobody"))
    shutil.chown(autograder / "results", "root", "root")
    attack = f"""
import os
from pathlib import Path
def ring_all_gather(chunks, comm):
    assert os.getuid() != 0, "I am root"
    for path in ({str(autograder / "results/results.json")!r}, {str(autograder / "source/minidist/__init__.py")!r}):
        try:
            Path(path).write_text("mine")
        except PermissionError:
            continue
        raise AssertionError("I could write " + path)
    honest(chunks, comm)
"""
    results = run(autograder, HONEST.replace("def ring_all_gather", "def honest") + attack)
    assert results["score"] == 100, [
        results["output"],
        *(test["output"] for test in results["tests"]),
    ]


def test_there_is_no_answer_in_the_zip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "autograder.zip"
    argv = ["grade", "02", "--package", "--out", str(out)]
    assert main(argv) == 0
    said = re.search(r"grades with seed (\d+); upload it to Gradescope", capsys.readouterr().out)
    assert said and said[1] != "0", "students grade with that"
    with zipfile.ZipFile(out) as file:
        names = set(file.namelist())
        assert {
            "setup.sh",
            "run_autograder",
            "minidist/__init__.py",
            "minidist/draw/player.html",
        } <= names
        assert not [name for name in names if "solution" in name or "mistakes" in name]
        assert f"--seed {said[1]} " in file.read("run_autograder").decode()
        installs = re.findall("pip install (.*)", file.read("setup.sh").decode())
        assert re.fullmatch("--index-url https://.*/cpu 'torch==.*'", installs[0]), "without CUDA"
        assert len(installs) == 2 and "torch" not in installs[1]
        assert file.getinfo("run_autograder").external_attr >> 16 & 0o111
        for name in ("setup.sh", "run_autograder"):
            script = tmp_path / name
            script.write_bytes(file.read(name))
            subprocess.run(["bash", "-n", str(script)], check=True)
    assert main(argv) == 2 and "exists already" in capsys.readouterr().err


def test_where_python_cannot_begin_there_is_a_results_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(package(LESSON, tmp_path / "autograder.zip", seed=3)) as file:
        file.extract("run_autograder", tmp_path)
    python = tmp_path / "source/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert run(tmp_path, "")["output"] == "the grader did not start: tell your instructor"


def test_every_door_tells_the_same_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--version"]) == 0 and capsys.readouterr().out == f"minidist {minidist.__version__}\n"
    )
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "minidist.__version__"}


@pytest.mark.parametrize("command", ["plan", "plan check", "bench engines", "grade"])
def test_help_needs_no_docstrings(command: str) -> None:
    """`python -OO` drops them, and some say what a command does."""
    words = [sys.executable, "-OO", "-m", "minidist", *command.split(), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
