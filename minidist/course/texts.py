"""Code of a barred module is recognized wherever it runs: by its instructions, not by its name."""

import functools
import sys
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

from minidist.course.grader.contract import Task

PACKAGE = Path(__file__).parents[1]
CHECKS = "checks"
SHORTEST = 24  # bytes of instructions: what is shorter may look like anybody's
Looks: TypeAlias = tuple[bytes, tuple[str, ...], tuple[str, ...], tuple[str, ...]]


class Texts:
    """The code of the modules that a task bars, to be recognized wherever it runs, by its
    instructions.

    `own` is the code of the student's file, read before it runs. Code whose globals are those of a
    library's module that was there before needs no look, and nearly all code is such. The rest is
    rare, so the barred files are read late.
    """

    def __init__(
        self,
        task: Task,
        exercise: str,
        lesson: str,
    ) -> None:
        self.task = task
        self.exercise = exercise
        self.lesson = lesson
        self.own: set[CodeType] = set()
        self.before: Set[int] = frozenset()
        self.looks: dict[Path, set[Looks]] = {}
        # by id, which stays the code's own while it is kept here
        self.seen: dict[int, tuple[CodeType, str]] = {}

    def begin(self, before: Set[int] = frozenset()) -> None:
        """Read the student's file; `before` are the ids of the globals of modules that are
        there.
        """
        self.before = before or globals_of_modules()
        with suppress(SyntaxError, ValueError, OSError):
            whole = compile(
                Path(self.exercise).read_bytes(),
                self.exercise,
                "exec",
            )
            self.own = set(codes_in(whole))

    def whose(self, code: CodeType, space: dict[str, Any]) -> str:
        """Return the barred module of which this is code; nothing if it is none's, or the student's
        own.
        """
        if id(code) not in self.seen:
            if id(space) in self.before:
                return ""
            found = "" if code in self.own else self.recognized(code)
            self.seen[id(code)] = code, found
        return self.seen[id(code)][1]

    def recognized(self, code: CodeType) -> str:
        """Return the barred module in whose text this code stands, or nothing.

        A text is compiled only if it has all of the code's names: nearly all that is looked at has
        others.
        """
        names = {*code.co_names, *code.co_varnames} - {".0"}
        if len(code.co_code) < SHORTEST:
            return ""
        for module, path, text in barred_texts(self.task, self.lesson):
            if not all(name in text for name in names):
                continue
            if path not in self.looks:
                whole = compile(text, str(path), "exec")
                self.looks[path] = set(map(looks_of, codes_in(whole)))
            if looks_of(code) in self.looks[path]:
                return module
        return ""


@functools.cache
def barred_texts(task: Task, lesson: str) -> tuple[tuple[str, Path, str], ...]:
    """Return name, path and text of each module that a task of a lesson bars.

    Whoever forks for many cases calls this before: to read the files again takes longer than most
    cases.
    """
    lessons = Path(lesson).glob("*.py")
    found = {path: CHECKS for path in lessons if path.name != "exercise.py"}
    for name in task.not_from:
        if name.partition(".")[0] == PACKAGE.name:
            place = PACKAGE.joinpath(*name.split(".")[1:])
            for path in (place.with_suffix(".py"), *place.rglob("*.py")):
                found[path] = dotted(path)
    there = [(path, name) for path, name in sorted(found.items()) if path.is_file()]
    return tuple((name, path, path.read_text(encoding="utf-8")) for path, name in there)


def dotted(path: Path) -> str:
    """Return the name of the package's module that stands in a file."""
    return ".".join(path.with_suffix("").parts[len(PACKAGE.parts) - 1 :])


def globals_of_modules() -> frozenset[int]:
    """Return the ids of the globals of all modules that are loaded, but for this package's own."""
    loaded = list(sys.modules.items())
    others = (module for name, module in loaded if name.partition(".")[0] != PACKAGE.name)
    return frozenset(id(getattr(module, "__dict__", None)) for module in others)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all that are within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_in(each)


def looks_of(code: CodeType) -> Looks:
    """Return what code is recognized by: not by its name, its file, its lines or its texts."""
    constants = tuple(repr(each) for each in code.co_consts if not isinstance(each, CodeType | str))
    return code.co_code, code.co_names, code.co_varnames, constants
