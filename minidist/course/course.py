"""`python -m minidist course`: write the course without its answers, to hand it out, or execute its
notebooks.

python -m minidist course build --student OUT     every lesson's text, exercise and twin
python -m minidist course notebooks 02 04         notebooks/src/*.py ──▶ notebooks/*.ipynb, with outputs

What is handed out has no solution, no mistake, and no check: judges compute the right answers, so
students grade with those of the package that they have installed.

    OUT/lessons/    what lies beside the lessons, and of each lesson its text, exercise and twin
    OUT/notebooks/  the executed notebooks
"""

import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from minidist.course.grade import default_lessons
from minidist.course.lesson import GradeError, lessons_in
from minidist.course.notebooks import build_notebooks
from minidist.full.launch.parser import Parser

HANDED_OUT = ("README.md", "exercise.py", "cluster.py")


def main(argv: Sequence[str]) -> int:
    """Build the handout or the notebooks; return the exit status: 0, or 2 if they cannot be
    written.
    """
    parser = Parser(prog="minidist course", description="Build the course's handout or notebooks.")
    commands = parser.add_subparsers(dest="command", required=True)
    handout = commands.add_parser("build", help="the handout for students")
    handout.add_argument(
        "--student", type=Path, metavar="OUT", required=True, help="the folder to write to"
    )
    handout.add_argument(
        "--lessons", type=Path, metavar="DIR", help="where the lessons are (lessons)"
    )
    notebooks = commands.add_parser("notebooks", help="the notebooks, executed")
    notebooks.add_argument("names", nargs="*", metavar="NN", help="which ones: 02 (all)")
    options = parser.parse_args(argv)
    lessons = default_lessons()
    try:
        if options.command == "build":
            written = build(options.lessons or lessons, options.student)
            print(
                f"{len(written)} lessons in {options.student / 'lessons'}. Edit an exercise.py, "
                "and grade it:"
            )
            print(f"    python -m minidist grade 02 --student {shlex.quote(str(options.student))}")
        else:
            for path in build_notebooks(lessons.parent / "notebooks", options.names):
                print(f"{path}: {path.stat().st_size:,} bytes")
    except (GradeError, OSError) as error:
        print(f"minidist course: {error}", file=sys.stderr)
        return 2
    return 0


def build(lessons: Path, out: Path) -> list[Path]:
    """Write every lesson's handout into `out/lessons`, which must not exist yet; return the
    lessons' folders.

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
    for lesson in found:
        copy([lesson / name for name in HANDED_OUT], target / lesson.name)
    return [target / lesson.name for lesson in found]


def copy(files: Iterable[Path], folder: Path) -> None:
    """Copy files into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(files):
        shutil.copyfile(file, folder / file.name)
