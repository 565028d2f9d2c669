"""The handout: everything a student needs, no answer, no mistake, no check; and the installed
package grades it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import mpirun
from test_grade import HONEST, LESSON

from minidist.__main__ import main
from minidist.course.course import build
from minidist.course.lesson import students_answer

ROOT = Path(__file__).parents[2]


def test_the_handout_has_no_answers(tmp_path: Path) -> None:
    out = tmp_path / "course"
    assert main(["course", "build", "--student", str(out)]) == 0
    there = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    of_lessons = {path.split("/")[-1] for path in there if path.count("/") == 2}
    assert of_lessons == {"README.md", "exercise.py", "cluster.py"}, "no judge knows what is right"
    beside = {path for path in there if path.count("/") == 1}
    assert {
        f"notebooks/{LESSON.name}.ipynb",
        "lessons/README.md",
        "lessons/cluster.sbatch",
    } <= beside
    assert {path.rpartition(".")[2] for path in beside} == {"ipynb", "md", "sbatch"}


def test_no_link_of_the_handout_leads_out_of_it(tmp_path: Path) -> None:
    build(LESSON.folder.parent, tmp_path)
    for page in (*tmp_path.rglob("*.md"), *tmp_path.rglob("*.ipynb")):
        text = page.read_text(encoding="utf-8")
        if page.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            there = (page.parent / link).resolve()
            assert there.exists() and there.is_relative_to(tmp_path), f"{page}: {link}"


def test_the_package_grades_the_handout_in_its_own_folder(tmp_path: Path) -> None:
    build(LESSON.folder.parent, tmp_path)
    command = [sys.executable, "-m", "minidist", "grade", "02", "--format", "json"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert first.returncode == 1 and json.loads(first.stdout)["score"] == 0
    (tmp_path / "lessons" / LESSON.name / "exercise.py").write_text(HONEST)
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    whole = json.loads(second.stdout)
    assert second.returncode == 0 and whole["score"] == whole["max_score"] == 100


@pytest.mark.parametrize("place", ("lessons", "", f"lessons/{LESSON.name}"))
def test_what_is_graded_is_what_one_stands_in(place: str, tmp_path: Path) -> None:
    """Not the checkout's, which is not started."""
    build(LESSON.folder.parent, tmp_path)
    (tmp_path / "lessons" / LESSON.name / "exercise.py").write_text(HONEST)
    command = [sys.executable, "-m", "minidist", "grade", "02", "--task", "4"]
    outcome = subprocess.run(command, cwd=tmp_path / place, capture_output=True, text=True)
    assert outcome.returncode == 0 and "15 of 15 points" in outcome.stdout, outcome.stderr


@pytest.mark.parametrize("place", (".", LESSON.name, f"lessons/{LESSON.name}"))
def test_an_answer_is_found_in_a_handout_in_its_folder_and_alone(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / "exercise.py").touch()
    assert students_answer(LESSON, tmp_path).path == tmp_path / place / "exercise.py"


def test_an_installed_package_brings_the_course(tmp_path: Path) -> None:
    """What goes into a wheel, used from an empty folder: the handout is built, says how to grade
    it, and is graded.
    """
    pytest.importorskip("setuptools")
    built, empty = tmp_path / "built", tmp_path / "empty"
    built.mkdir()
    empty.mkdir()
    command = [
        "setup.py",
        "-q",
        "egg_info",
        "--egg-base",
        str(tmp_path),
        "build_py",
        "--build-lib",
        str(built),
    ]
    outcome = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    taken = {path.name for path in (built / "minidist" / "lessons").rglob("*.*")}
    assert {
        "checks.py",
        "judges.py",
        "exercise.py",
        "solution.py",
    } <= taken and "honest.py" not in taken

    def minidist(*argv: str, stand: Path = empty) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(built), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "minidist", *argv]
        return subprocess.run(command, cwd=stand, env=environment, capture_output=True, text=True)

    lost = minidist("grade", "02")
    assert (lost.returncode, lost.stdout) == (2, "") and "course build --student OUT" in lost.stderr
    said = minidist("course", "build", "--student", "OUT").stdout.splitlines()[-1].split()
    assert said == ["python", "-m", "minidist", "grade", "02", "--student", "OUT"]
    assert (empty / "OUT/notebooks" / f"{LESSON.name}.ipynb").is_file()
    assert minidist(*said[3:], "--task", "4").stdout.endswith("0 of 15 points\n")
    (empty / "OUT/lessons" / LESSON.name / "exercise.py").write_text(HONEST)
    assert minidist(*said[3:], "--task", "4").stdout.endswith("15 of 15 points\n")
    lent = f"import_module('minidist.lessons.{LESSON.name}.judges').lengths(elements, ranks)"
    own = "[elements // ranks + (i < elements % ranks) for i in range(ranks)]"
    assert own in HONEST
    leaning = f"from importlib import import_module\n{HONEST.replace(own, lent)}"
    (empty / "OUT/lessons" / LESSON.name / "exercise.py").write_text(leaning)
    said_to_it = minidist(*said[3:], "--task", "4").stdout
    assert "calls minidist.lessons." in said_to_it and said_to_it.endswith("0 of 15 points\n")
    (empty / "OUT/lessons" / LESSON.name / "exercise.py").write_text(HONEST)
    stand = empty / "OUT" / "lessons"
    assert minidist("grade", "02", "--task", "4", stand=stand).stdout.endswith("15 of 15 points\n")


def test_the_exercise_runs_under_mpirun_as_handed_out() -> None:
    outcome = mpirun(4, LESSON.folder / "exercise.py", python=[sys.executable])
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines() == [
        f"task {n}: task {n} is not started" for n in (1, 2, 3, 4)
    ]


def test_the_exercise_prints_what_it_computes(tmp_path: Path) -> None:
    text = (LESSON.folder / "exercise.py").read_text()
    (tmp_path / "exercise.py").write_text(text.replace("def main(", HONEST + "\n\ndef main("))
    outcome = mpirun(4, tmp_path / "exercise.py", python=[sys.executable])
    assert outcome.returncode == 0, outcome.stderr
    assert "task 1: the sum of chunk 0 is [6. 6.]" in outcome.stdout
    assert "task 2: the chunks are [0. 0. 1. 1. 2. 2. 3. 3.]" in outcome.stdout
    assert "task 3: the sum of all buffers is [ 6. 10. 14. 18. 22.]" in outcome.stdout
    assert "task 4: (messages, bytes) of 10 doubles: (6, 112)" in outcome.stdout


def test_what_cannot_be_built_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lessons").mkdir()
    for argv, told in (
        (["--student", str(tmp_path)], "exists already: name another folder"),
        (
            ["--student", str(tmp_path / "x"), "--lessons", "/nowhere"],
            "there are no lessons in /nowhere",
        ),
    ):
        assert main(["course", "build", *argv]) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1
