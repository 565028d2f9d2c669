"""`python -m minidist course`: write the course without its answers, to hand it out, or execute its notebooks.

python -m minidist course build --student OUT     every lesson's text, exercise and visible checks
python -m minidist course notebooks 02 04         notebooks/src/*.py ──▶ notebooks/*.ipynb, with outputs
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from minidist.course.grade import default_lessons
from minidist.course.handout import build
from minidist.course.lesson import GradeError
from minidist.course.notebooks import build_notebooks


def main(argv: Sequence[str]) -> int:
    """Build the handout or the notebooks; return the exit status: 0, or 2 if they cannot be written."""
    parser = argparse.ArgumentParser(prog="minidist course", description="Build the course's handout or notebooks.")
    commands = parser.add_subparsers(dest="command", required=True)
    handout = commands.add_parser("build", help="the handout for students")
    handout.add_argument("--student", type=Path, metavar="OUT", required=True, help="the folder to write to")
    handout.add_argument("--lessons", type=Path, metavar="DIR", help="where the lessons are (lessons)")
    notebooks = commands.add_parser("notebooks", help="the notebooks, executed")
    notebooks.add_argument("names", nargs="*", metavar="NN", help="which ones: 02 (all)")
    notebooks.add_argument(
        "--folder", type=Path, metavar="DIR", help="where the notebooks are (notebooks, beside the lessons)"
    )
    options = parser.parse_args(argv)
    lessons = default_lessons()
    try:
        if options.command == "build":
            written = build(options.lessons or lessons, options.student)
            print(f"{len(written)} lessons in {options.student / 'lessons'}. Edit an exercise.py, and grade it:")
            print(f"    python -m minidist grade 02 --student {shlex.quote(str(options.student))}")
        else:
            for path in build_notebooks(options.folder or lessons.parent / "notebooks", options.names):
                print(f"{path}: {path.stat().st_size:,} bytes")
    except (GradeError, OSError) as error:
        print(f"minidist course: {error}", file=sys.stderr)
        return 2
    return 0
