"""Grade in this process, where no other can be started: in a page that runs Python itself.

    grade_here(lesson, students_answer(lesson, folder))     the visible checks, on simulated ranks

The checks, the judges and the words are those of `grader/`. What keeps an answer from cheating is
not: that takes a process for each case, and a wall between the two. A grade from here is for whoever
wrote the answer. An answer that does not end is ended by whoever shows the page.
"""

import importlib
import io
from collections.abc import Callable, Set
from contextlib import redirect_stdout

from minidist.course.grader.child import (
    Part,
    Share,
    check_untouched,
    describe,
    exercises_of,
    run_program,
    seal,
)
from minidist.course.grader.contract import Check
from minidist.course.grader.grading import (
    NOT_STARTED,
    Drawn,
    Graded,
    draw,
    is_handout,
    together,
)
from minidist.course.grader.runner import Ran, Told, missing, outcome
from minidist.course.grader.watch import Watch
from minidist.course.lesson import Answer, Lesson


def visible(check: Check) -> bool:
    """Tell whether a check can be graded here, and may be seen."""
    return check.wire == "threads" and not check.hidden


def grade_here(
    lesson: Lesson,
    answer: Answer,
    *,
    seed: int = 0,
    only: Callable[[Check], bool] = lambda check: True,
) -> list[Graded]:
    """Grade one file by the `visible` checks of a lesson; see `grader.grading.grade`."""
    drawn = draw(lesson, seed, lambda check: visible(check) and only(check))
    if is_handout(lesson, answer):
        return together(lesson, answer, drawn, [UNTOUCHED] * len(drawn))
    sealed = seal()
    rans = [_run(lesson, each, answer, sealed) for each in drawn]
    return together(lesson, answer, drawn, rans)


UNTOUCHED = Ran(not_started=NOT_STARTED)


def _run(lesson: Lesson, drawn: Drawn, answer: Answer, sealed: list[Part]) -> Ran:
    """Run one case."""
    shares = {
        rank: Share(rank, "", {name: array.copy() for name, array in given.items()})
        for rank, given in enumerate(drawn.case.given)
    }
    for name in drawn.check.task.imports:
        importlib.import_module(name)
    exercise, folder = str(answer.path), str(lesson.folder)
    watch = _Shared(drawn.check.task, exercise, folder, shares[0].notes.append)
    watch.begin()
    try:
        with redirect_stdout(io.StringIO()):
            exercises = exercises_of(shares, watch)
            run_program(drawn.check.program, exercises, watch, shares, None, io.StringIO())
        check_untouched(sealed)
    except BaseException as error:
        if not any(share.error for share in shares.values()):  # it came before any rank had started
            for share in shares.values():
                share.error = describe(error, exercise, folder)
    finally:
        watch.switch(None)
    told = [
        Told(share.results is not None, share.error or {}, share.notes, share.results or {})
        for share in shares.values()
    ]
    return outcome(told) or Ran(failure=missing(told))


class _Shared(Watch):
    """A watch in the grader's own process."""

    def begin(self, before: Set[int] = frozenset()) -> None:
        """Watch this thread. Nothing is changed that could not be changed back, as an audit hook."""
        self.texts.begin(before)
        self.switch(self.calls)
