"""Grading in the grader's own process, as a page does: the same verdicts as in processes apart."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minidist.course.grade import default_lessons
from minidist.course.grader.grading import grade
from minidist.course.here import visible
from minidist.course.lesson import Answer, find_lesson

LESSONS = default_lessons()
# in a process of its own, as a page is: the watch looks at all that is called in it
PROGRAM = """
import json, sys
from pathlib import Path
from minidist.course.here import grade_here
from minidist.course.lesson import Answer, find_lesson
lesson = find_lesson(Path(sys.argv[1]), sys.argv[2])
found = []
for file in sys.argv[3:]:
    tests = grade_here(lesson, Answer(Path(file)))
    found.append([[test.number, test.score, test.status, test.output] for test in tests])
assert sys.getprofile() is None
print(json.dumps(found))
"""
MISTAKES = {
    "waits for a message that nobody sends": "comm.recv(own.copy(), (comm.rank + 1) % comm.size)",
    "sends what it should not": "comm.send(own, (comm.rank + 1) % comm.size) if comm.rank else None",
    "calls what is barred": "from minidist.full.collectives import all_reduce; all_reduce(own, comm)",
    "turns the watch off": "__import__('sys').setprofile(None)",
    "replaces a part of the package": "type(comm).send = lambda *_, **__: None",
}


def graded_here(number: str, *files: Path) -> Any:
    words = [sys.executable, "-c", PROGRAM, str(LESSONS), number, *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", ("01", "02", "03"))
def test_right_answers_have_all_visible_points_and_the_handout_none(
    number: str, tmp_path: Path
) -> None:
    lesson = find_lesson(LESSONS, number)
    for name in ("honest", "exercise"):
        (tmp_path / name).mkdir()
        shutil.copyfile(lesson.folder / f"{name}.py", tmp_path / name / "exercise.py")
    right, handout = graded_here(
        number, tmp_path / "honest/exercise.py", tmp_path / "exercise/exercise.py"
    )
    assert {test[2] for test in right} == {"passed"}
    points = sum(check.points for check in lesson.checks if visible(check))
    assert sum(test[1] for test in right) == pytest.approx(points) and points > 60
    assert {test[2] for test in handout} == {"not started"}
    assert [test[0] for test in handout] == [test[0] for test in right]


def test_wrong_answers_hear_the_same_as_in_a_process_of_their_own(tmp_path: Path) -> None:
    lesson, files = find_lesson(LESSONS, "01"), []
    text = (lesson.folder / "exercise.py").read_text()
    for name, line in MISTAKES.items():
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "exercise.py")
        stub = 'raise NotImplementedError("task 1 is not started")'
        assert text.count(stub) == 1
        files[-1].write_text(text.replace(stub, f"{line}\n    return own.copy()"))
    found = graded_here("01", *files)
    for file, here in zip(files[:3], found, strict=False):
        apart = grade(
            lesson, Answer(file), only=lambda check: visible(check) and check.task.number == 1
        )
        expected = [[test.number, test.score, test.status, test.output] for test in apart]
        assert here[: len(expected)] == expected and here[0][2] == "failed"
    for here, said in zip(
        found[3:], ("replaces sys.setprofile", "belongs to minidist"), strict=True
    ):
        assert said in here[0][3] and not here[0][1]
