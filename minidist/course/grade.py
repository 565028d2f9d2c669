"""`python -m minidist grade 02`: grade an exercise.

    1.1    4.0 of  4.0  passed       ring reduce-scatter: adds up every chunk (2 ranks, 6 elements)
    2.1    0.0 of  3.0  failed       ring all-gather: passes every chunk on (3 ranks, 10 elements)
           rank 1: chunk 2[0] is 0.0, expected 35.0

    python -m minidist grade --package 02 --seed 7     the zip for Gradescope, in place of a grade

Exit status: 0 at full score, 1 below it, 2 if nothing could be graded, or with `--all` not every
lesson: one without an exercise.py has 0 points. `--format gradescope` always writes a results file,
which gives 0 points until the grade is known.
"""

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from minidist.course.grader import report
from minidist.course.grader.contract import Check
from minidist.course.grader.grading import AT_ONCE, HANGS, LIMIT, Graded, absent, grade
from minidist.course.grader.runner import warm_processes
from minidist.course.lesson import (
    Answer,
    GradeError,
    find_lesson,
    lessons_in,
    reference_answer,
    students_answer,
)
from minidist.course.package import package
from minidist.full.comm.errors import LaunchError
from minidist.full.launch.parser import Parser, flag_of
from minidist.full.options import NOT_NEGATIVE, SECONDS

PACKAGE = Path(__file__).parents[1]
INSTALLED = PACKAGE / "lessons"
FORMATS = {
    "table": report.table,
    "json": report.as_json,
    "junit": report.junit,
    "gradescope": report.gradescope,
}
ENDS = () if sys.platform == "win32" else (signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str]) -> int:
    """Grade, or build the zip; return the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if bool(options.lesson) == options.all:
        parser.error("name one lesson, as in minidist grade 02, or say --all")
    if options.package and options.all:
        parser.error("a zip grades one lesson: minidist grade --package 02")
    if options.seed is None:  # students grade with 0
        options.seed = secrets.randbelow(1 << 30) if options.package else 0
    results: Path | None = None  # Gradescope's: only this file tells it that something went wrong
    try:
        if options.package:
            lesson = find_lesson(options.lessons or default_lessons(), options.lesson)
            path = package(lesson, options.out or Path(f"minidist-{lesson.name}.zip"), options.seed)
            print(
                f"{path}: {path.stat().st_size:,} bytes, grades with seed {options.seed}; upload it "
                "to Gradescope as the autograder"
            )
            return 0
        if options.format == "gradescope":
            options.out = results = options.out or Path("results.json")
            write(
                results,
                report.gradescope([], "the grader was ended before it had finished: submit again"),
            )
        if options.out is not None:
            options.out.touch()  # now, as a grade that cannot be written is lost
        with leaving_nothing():
            tests, missing = graded(options)
        write(options.out, FORMATS[options.format](tests))
    except (GradeError, LaunchError, OSError) as error:
        print(f"minidist grade: {error}", file=sys.stderr)
        if results is not None and results.parent.is_dir():
            write(results, report.gradescope([], str(error)))
        return 2
    except KeyboardInterrupt:
        print("minidist grade: interrupted, so there is no grade", file=sys.stderr)
        return 128 + signal.SIGINT
    for why in missing:
        print(f"minidist grade: 0 points, as {why}", file=sys.stderr)
    score, most = report.totals(tests)
    return 2 if missing else 0 if tests and score == most else 1


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind as Ctrl-C does: by default they would end the grader at once, and
    leave its folders and what answers have started behind.
    """
    heard = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end(number: int, _: object) -> None:
    """End with a shell's number for "ended by a signal"."""
    sys.exit(128 + number)


def graded(options: argparse.Namespace) -> tuple[list[Graded], list[str]]:
    """Return the tests of the lessons that the options name, and why some of `--all` have no
    answer.
    """

    def chosen(check: Check) -> bool:
        there = check.wire == "threads" or not options.simulated
        return there and options.task in (None, check.task.number)

    if options.user:
        check_user(options.user)
    folder = options.lessons or default_lessons()
    student = options.student or options.lessons or nearest("exercise.py")
    if student == INSTALLED and not options.solution:
        raise GradeError(
            "say where your answers are: --student OUT, which minidist course build --student OUT "
            "makes"
        )
    names = [lesson.name for lesson in lessons_in(folder)] if options.all else [options.lesson]
    lessons = [find_lesson(folder, name) for name in names]
    answers: list[Answer | str] = []
    for lesson in lessons:
        try:
            answers.append(
                reference_answer(lesson) if options.solution else students_answer(lesson, student)
            )
        except GradeError as error:
            if not options.all:
                raise
            answers.append(str(error))
    missing = [why for why in answers if isinstance(why, str)]
    if missing and len(missing) == len(lessons):
        raise GradeError(missing[0])
    tests: list[Graded] = []
    there = [answer for answer in answers if not isinstance(answer, str)]
    with warm_processes(lessons, AT_ONCE, options.user, there) as warm:
        for lesson, answer in zip(lessons, answers, strict=True):
            if isinstance(answer, str):
                tests += absent(lesson, answer, options.seed, chosen)
            else:
                tests += grade(
                    lesson, answer, seed=options.seed, limit=options.limit, only=chosen, warm=warm
                )
    if not lessons:
        raise GradeError(f"there are no lessons in {folder}: name their folder with --lessons")
    if not tests:
        raise GradeError(
            f"{', '.join(names)} has no task {options.task}: leave --task out to see all of them"
        )
    return tests, missing


def default_lessons() -> Path:
    """Return the folder of the lessons and their checks; a handout has none."""
    return nearest("checks.py")


def nearest(file: str) -> Path:
    """Return the folder of lessons with such a file: at or near the working folder, else beside the
    package, else installed in it.
    """
    here = Path.cwd()
    places = (here / "lessons", here, here.parent, PACKAGE.parent / "lessons")
    there = (place for place in places if any(place.glob(f"[0-9][0-9]_*/{file}")))
    return next(there, INSTALLED)


def write(path: Path | None, text: str) -> None:
    """Print, or write a file."""
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="minidist grade", description="Grade an exercise of the course.")
    add, number = parser.add_argument, flag_of(int, NOT_NEGATIVE)
    add("lesson", nargs="?", help="its number: 02")
    add(
        "--all",
        action="store_true",
        help="grade every lesson; one without an exercise.py has 0 points",
    )
    add("--task", type=number, metavar="N", help="grade this task only, while you work on it")
    add(
        "--simulated",
        action="store_true",
        help="leave out the checks under mpirun, and their points: for a machine without MPI",
    )
    add(
        "--student",
        type=Path,
        metavar="DIR",
        help="where the exercise.py is, or a handout with it (lessons)",
    )
    add(
        "--lessons",
        type=Path,
        metavar="DIR",
        help="where the lessons and their checks are (here, or our own)",
    )
    add("--format", choices=FORMATS, default="table", help="how to tell the result (table)")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write it there (printed; gradescope: results.json)",
    )
    add(
        "--seed",
        type=number,
        help="what the cases are drawn from (0; --package: one that it draws)",
    )
    add(
        "--limit",
        type=flag_of(float, SECONDS),
        default=LIMIT,
        help=f"seconds for one case ({LIMIT:g}); after {HANGS} in a row that take more, the rest of the "
        "task is not tried",
    )
    add("--user", help="run the student's code as this user (needs root)")
    add("--package", action="store_true", help="build the autograder's zip for Gradescope instead")
    add(
        "--solution",
        action="store_true",
        help="grade the lessons' own solutions, to try the checks",
    )
    return parser


def check_user(name: str) -> None:
    """Raise GradeError if nothing can be run here as this user."""
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        raise GradeError(
            f"there is no user {name!r}: create it first, or leave --user out"
        ) from None
    if os.geteuid() != 0:
        raise GradeError(f"only root can run code as {name!r}: leave --user out")
