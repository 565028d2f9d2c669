"""A lesson's folder, and the file to be graded.

    lessons/05_zero/    README.md      the text
                        exercise.py    what is to be filled in
                        checks.py      `CHECKS`: for each task the cases, and what they are worth
                        judges*.py     what runs beside an answer, and the judges, which know what is right
                        solution.py    the answer, taken from the package
                        honest.py      the answer, written by hand; both have full points
                        mistakes/      wrong answers, each of which loses points
                        cluster.py     the twin: the same idea at full scale, in torch's own classes

What a check is made of stands in `grader/contract.py`.
"""

import re
import sys
import traceback
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from minidist.course.grader.contract import Check

LARGEST = 1 << 20  # bytes of an answer: it is copied and read for each case


class GradeError(ValueError):
    """Something cannot be graded. The text is one sentence that says why, and what to do."""


class Lesson(NamedTuple):
    """A lesson: `lessons/02_ring_all_reduce`, with its checks."""

    folder: Path
    checks: tuple[Check, ...]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name


class Answer(NamedTuple):
    """A file to be graded.

    `may_lean` lets it use the package's own answer and import from the lesson's folder, as the
    solution does, and the mistakes, each of which changes one function of the solution.
    """

    path: Path
    may_lean: bool = False


def lessons_in(folder: Path) -> list[Path]:
    """Return the folders of the lessons that can be graded, in order."""
    return sorted(checks.parent for checks in folder.glob("[0-9][0-9]_*/checks.py"))


def find_lesson(folder: Path, number: str) -> Lesson:
    """Return lesson `02`, `2` or `02_ring_all_reduce`. Raises GradeError if there is none."""
    there = lessons_in(folder)
    for lesson in there:
        if number == lesson.name or (number.isdecimal() and int(number) == int(lesson.name[:2])):
            return Lesson(lesson, tuple(load_checks(lesson / "checks.py")))
    names = ", ".join(lesson.name for lesson in there) or "none"
    raise GradeError(f"there is no lesson {number!r} in {folder}: there are {names}")


def students_answer(lesson: Lesson, folder: Path) -> Answer:
    """Return a student's exercise, in the handout at `folder`, a folder there of the lesson's name,
    or `folder`.
    """
    for place in (folder / "lessons" / lesson.name, folder / lesson.name, folder):
        path = place / "exercise.py"
        if path.is_file():
            if path.stat().st_size > LARGEST:
                raise GradeError(
                    f"{path} has {path.stat().st_size:,} bytes, an answer at most {LARGEST:,}: take "
                    "out what is no code"
                )
            return Answer(path)
    raise GradeError(
        f"there is no exercise.py of lesson {lesson.name} in {folder}: put your answer there, under "
        "that name"
    )


def reference_answer(lesson: Lesson, file: str = "solution.py") -> Answer:
    """Return the lesson's solution, or one of its mistakes."""
    return Answer(lesson.folder / file, may_lean=True)


def load_checks(path: Path) -> list[Check]:
    """Return the checks of a lesson. They may import the judges beside them, and judges each other.

    Afterwards nobody can import either.
    """
    files = [*in_order(list(path.parent.glob("judges*.py"))), path]
    try:
        modules = [load_module(file.stem, file) for file in files]
    finally:
        for file in files:
            sys.modules.pop(file.stem, None)
    return list(modules[-1].CHECKS)


def in_order(files: list[Path]) -> list[Path]:
    """Return files that import each other so that each comes after those that it imports."""
    named = {file.stem: file for file in files}
    needs = {}
    for name, file in sorted(named.items()):
        imported = re.findall(r"^from (\w+) import", file.read_text(encoding="utf-8"), re.MULTILINE)
        needs[name] = sorted(named.keys() & set(imported))
    return [named[name] for name in TopologicalSorter(needs).static_order()]


def place_of(frame: traceback.FrameSummary) -> str:
    """Return `exercise.py:14 in ring_all_gather`."""
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def load_module(name: str, path: Path) -> ModuleType:
    """Import one file from its source, whatever is called so elsewhere, and leave no compiled copy
    beside it.
    """
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module
