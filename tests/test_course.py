"""The handout: everything a student needs, no answer, no mistake, no hidden check; and it grades itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import mpirun
from test_grade import HONEST, LESSON

from minidist.__main__ import main
from minidist.grade.handout import HIDDEN, build
from minidist.grade.lesson import GradeError, load_checks


def test_the_handout_has_no_answers(tmp_path: Path) -> None:
    out = tmp_path / "course"
    assert main(["course", "build", "--student", str(out)]) == 0
    there = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    lesson = f"lessons/{LESSON.name}"
    assert {f"{lesson}/exercise.py", f"{lesson}/checks.py"} <= there
    of_lessons = {path.split("/")[-1] for path in there if path.count("/") == 2}
    assert of_lessons == {"README.md", "exercise.py", "checks.py", "judges.py", "cluster.py"}
    beside = {path for path in there if path.count("/") == 1}
    assert {f"notebooks/{LESSON.name}.ipynb", "lessons/README.md", "lessons/cluster.sbatch"} <= beside
    assert {path.rpartition(".")[2] for path in beside} == {"ipynb", "md", "sbatch"}
    text = (out / lesson / "checks.py").read_text()
    assert HIDDEN not in text and "hidden=True" not in text
    visible = [check for check in LESSON.checks if not check.hidden]
    assert [check.title for check in load_checks(out / lesson / "checks.py")] == [check.title for check in visible]
    assert len(visible) < len(LESSON.checks)


def test_the_handout_grades_itself_in_its_own_folder(tmp_path: Path) -> None:
    build(LESSON.folder.parent, tmp_path)
    command = [sys.executable, "-m", "minidist", "grade", "02", "--format", "json"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert first.returncode == 1 and json.loads(first.stdout)["score"] == 0
    (tmp_path / "lessons" / LESSON.name / "exercise.py").write_text(HONEST)
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    whole = json.loads(second.stdout)
    assert second.returncode == 0 and whole["score"] == whole["max_score"] == 73
    assert {test["visibility"] for test in whole["tests"]} == {"visible"}


def test_the_exercise_runs_under_mpirun_as_handed_out() -> None:
    outcome = mpirun(4, LESSON.folder / "exercise.py")
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines() == [f"task {n}: task {n} is not started" for n in (1, 2, 3, 4)]


def test_the_exercise_prints_what_it_computes(tmp_path: Path) -> None:
    text = (LESSON.folder / "exercise.py").read_text()
    (tmp_path / "exercise.py").write_text(text.replace("def main(", HONEST + "\n\ndef main("))
    outcome = mpirun(4, tmp_path / "exercise.py")
    assert outcome.returncode == 0, outcome.stderr
    assert "task 1: the sum of chunk 0 is [6. 6.]" in outcome.stdout
    assert "task 2: the chunks are [0. 0. 1. 1. 2. 2. 3. 3.]" in outcome.stdout
    assert "task 3: the sum of all buffers is [ 6. 10. 14. 18. 22.]" in outcome.stdout
    assert "task 4: (messages, bytes) of 10 doubles: (6, 112)" in outcome.stdout


def test_what_cannot_be_built_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lessons").mkdir()
    for argv, told in (
        (["--student", str(tmp_path)], "exists already: name another folder"),
        (["--student", str(tmp_path / "x"), "--lessons", "/nowhere"], "there are no lessons in /nowhere"),
    ):
        assert main(["course", "build", *argv]) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1


def test_a_hidden_check_above_the_line_is_noticed(tmp_path: Path) -> None:
    lesson = tmp_path / "in" / LESSON.name
    lesson.mkdir(parents=True)
    (lesson / "checks.py").write_text((LESSON.folder / "checks.py").read_text().replace(HIDDEN, "# "))
    with pytest.raises(GradeError, match="has a hidden check above its line"):
        build(tmp_path / "in", tmp_path / "out")
