"""The course as it is handed out: no solution, no mistake, no hidden check.

    OUT/lessons/    what lies beside the lessons, and of each lesson its text, exercise, twin and visible checks
    OUT/notebooks/  the executed notebooks

A lesson's `checks.py` has its hidden checks at its end, below the line `HIDDEN`; the handout's copy ends at that line.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from minidist.course.lesson import GradeError, lessons_in, load_checks

HIDDEN = "# ---- hidden: the handout ends here"
HANDED_OUT = ("README.md", "exercise.py", "judges*.py", "cluster.py")


def build(lessons: Path, out: Path) -> list[Path]:
    """Write every lesson's handout into `out/lessons`, which must not exist yet; return the lessons' folders.

    Raises
    ------
    GradeError
        If there are no lessons, or something is there already.
    """
    found, target = lessons_in(lessons), out / "lessons"
    if not found:
        raise GradeError(f"there are no lessons in {lessons}: name their folder with --lessons")
    if target.exists():
        raise GradeError(f"{target} exists already: name another folder, or remove it first")
    target.mkdir(parents=True)
    copy([*lessons.glob("*.md"), *lessons.glob("*.sbatch")], target)
    copy((lessons.parent / "notebooks").glob("*.ipynb"), out / "notebooks")
    written = []
    for lesson in found:
        folder = target / lesson.name
        copy([path for name in HANDED_OUT for path in lesson.glob(name)], folder)
        visible = (lesson / "checks.py").read_text(encoding="utf-8").partition(HIDDEN)[0]
        (folder / "checks.py").write_text(visible.rstrip() + "\n", encoding="utf-8")
        if any(check.hidden for check in load_checks(folder / "checks.py")):
            raise GradeError(f"{lesson / 'checks.py'} has a hidden check above its line {HIDDEN!r}: move it below")
        written.append(folder)
    return written


def copy(files: Iterable[Path], folder: Path) -> None:
    """Copy files into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(files):
        shutil.copyfile(file, folder / file.name)
