"""`python -m minidist course build --student OUT`: the course to hand out, without its answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minidist.cli.grade import default_lessons
from minidist.grade.handout import build
from minidist.grade.lesson import GradeError


def main(argv: Sequence[str]) -> int:
    """Build the handout; return the exit status: 2 if it cannot be written."""
    parser = argparse.ArgumentParser(prog="minidist course", description="Build the course's handout.")
    parser.add_argument("what", choices=["build"], help="build")
    parser.add_argument("--student", metavar="OUT", required=True, help="the folder to write to")
    parser.add_argument("--lessons", metavar="DIR", help="where the lessons are (lessons)")
    options = parser.parse_args(argv)
    try:
        written = build(Path(options.lessons) if options.lessons else default_lessons(), Path(options.student))
    except (GradeError, OSError) as error:
        print(f"minidist course: {error}", file=sys.stderr)
        return 2
    print(
        f"{len(written)} lessons in {Path(options.student) / 'lessons'}: grade there with python -m minidist grade 02"
    )
    return 0
