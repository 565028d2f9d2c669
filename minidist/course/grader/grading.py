"""From runs to points. Everything here happens in the grader's own process."""

import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from minidist.course.grader.compare import COMES_OUT, OR_IF, refuting
from minidist.course.grader.contract import UNUSABLE, Case, Check, Judge, Program, Wrong, leaning
from minidist.course.grader.runner import UNREADABLE, Ran, run_case, warm_processes
from minidist.course.grader.warm import Warm
from minidist.course.lesson import Answer, Lesson, place_of

PASSED, FAILED, NOT_STARTED, LEANS = "passed", "failed", "not started", "leans"
LIMIT = 10.0  # seconds for a case on simulated ranks
MORE_FOR_MPI = 3.0  # times as long under mpirun, which first has to start them
AT_ONCE = 2  # cases that run beside each other
HANGS = 3  # cases of a task in a row that run into the limit: the rest of it is not tried
NOT_TRIED = f"not tried, since {HANGS} cases in a row before it did not end in time: see there at which line"
LEAST = 0.1  # of a task's points: what a wrong answer costs at least
TOLD = 3  # of the mistakes that fit as many cases as any, so many are told


class Graded(NamedTuple):
    """One case of one check, graded."""

    lesson: str
    check: Check
    number: str
    label: str
    score: float
    max_score: float
    status: str
    output: str = ""
    figures: Mapping[str, float] = {}

    @property
    def name(self) -> str:
        """What the case is about: `task 1, ring reduce-scatter: adds up every chunk (3 ranks, 10
        elements)`.
        """
        return (
            f"task {self.check.task.number}, {self.check.task.title}: {self.check.title} "
            f"({self.label})"
        )


def grade(
    lesson: Lesson,
    answer: Answer,
    *,
    seed: int = 0,
    limit: float = LIMIT,
    only: Callable[[Check], bool] = lambda check: True,
    warm: Warm | None = None,
) -> list[Graded]:
    """Grade one file; return every case of every check, in order.

    Parameters
    ----------
    seed : int
        The cases are drawn from it. Another seed draws other values and, where a check says so,
        other sizes and rank counts.
    limit : float
        Seconds that one case may take on simulated ranks.
    only
        Says which checks to run; the others are left out of the result.
    warm : optional
        The processes that run the cases, and as which user. Several gradings may share them.
        Default: they are started and ended here.
    """
    untouched = is_handout(lesson, answer)
    plan = draw(lesson, seed, only)
    rans: dict[int, Ran] = {}

    def one(place: int) -> None:
        drawn = plan[place]
        seconds = limit * (MORE_FOR_MPI if drawn.check.wire == "mpi" else 1)
        if untouched:
            rans[place] = Ran(not_started=NOT_STARTED)
        elif given_up(plan, place, rans):
            rans[place] = Ran(failure=NOT_TRIED)
        else:
            rans[place] = run_case(lesson, drawn.number, drawn.case, answer, seconds, ready)

    with (
        nullcontext(warm) if warm else warm_processes([lesson], AT_ONCE, answers=[answer]) as ready,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        try:
            list(pool.map(one, range(len(plan))))
        except BaseException:  # Ctrl-C, or a signal: nobody waits for the cases that still run
            pool.shutdown(wait=False, cancel_futures=True)
            ready.end(ready.importer)
            raise
    # one that ran beside the last of those that hang counts as not tried, whoever was faster
    tried = [
        Ran(failure=NOT_TRIED) if given_up(plan, place, rans) else rans[place]
        for place in range(len(plan))
    ]
    return together(lesson, answer, plan, tried)


def absent(
    lesson: Lesson, why: str, seed: int = 0, only: Callable[[Check], bool] = lambda check: True
) -> list[Graded]:
    """Return the cases of a lesson of which there is no answer: 0 points each, and `why`."""
    nowhere = Answer(lesson.folder / "exercise.py")
    plan = draw(lesson, seed, only)
    return together(lesson, nowhere, plan, [Ran(failure=why)] * len(plan))


class Drawn(NamedTuple):
    """A case to be run: of which check of the lesson, and its points."""

    number: int
    check: Check
    case: Case
    points: float


def draw(lesson: Lesson, seed: int, only: Callable[[Check], bool]) -> list[Drawn]:
    """Return the cases of a lesson's checks, as far as they are asked for. Points are shared out in
    hundredths, so that they add up.
    """
    plan: list[Drawn] = []
    for index, check in enumerate(lesson.checks):
        if only(check):
            cases = check.draw(np.random.default_rng([seed, index]))
            ends = [round(check.points * n / (len(cases) or 1), 2) for n in range(len(cases) + 1)]
            points = [round(after - before, 2) for before, after in pairwise(ends)]
            plan += [Drawn(index, check, *each) for each in zip(cases, points, strict=True)]
    return plan


def given_up(plan: Sequence[Drawn], place: int, rans: Mapping[int, Ran]) -> bool:
    """Tell whether `HANGS` cases in a row before this one hang, of its task, or of all tasks where
    the file itself does not end.
    """
    task, before = plan[place].check.task.number, range(place)
    nothing = Ran()
    of_task = [
        rans.get(each, nothing).hung for each in before if plan[each].check.task.number == task
    ]
    of_file = [
        rans.get(each, nothing).hung and " in <module>" in rans[each].failure for each in before
    ]
    return any(
        all(hung[first : first + HANGS])
        for hung in (of_task, of_file)
        for first in range(len(hung) - HANGS + 1)
    )


def judged(lesson: Lesson, answer: Answer, drawn: Drawn, ran: Ran) -> Graded:
    """Return what a case is worth that has run."""
    _, check, case, points = drawn
    status, output, figures = verdict(check, case, ran, answer)
    score = points if status == PASSED else 0.0
    return Graded(
        lesson.name, check, "", case.label, score, points, status, printable(output), figures
    )


def together(
    lesson: Lesson, answer: Answer, plan: Sequence[Drawn], rans: Sequence[Ran]
) -> list[Graded]:
    """Number the cases, and let those of a task tell of each other: those that fail by a known
    mistake are judged again, without the mistakes that would have given something else in more
    cases that have passed than they explain. (In one it may have been avoided by chance, as by an
    early return on one rank.)
    """
    pairs = list(zip(plan, rans, strict=True))
    tests = [judged(lesson, answer, *pair) for pair in pairs]
    wrong = [place for place, test in enumerate(tests) if causes(test.output)[1]]
    for about in {_about(plan[place]) for place in wrong}:
        against, fits = Counter[str](), Counter[str]()
        for pair, test in zip(pairs, tests, strict=True):
            if _about(pair[0]) == about:
                fits.update(causes(test.output)[1])
                refuted = set[str]()
                with refuting(refuted):
                    if test.status == PASSED:
                        judged(lesson, answer, *pair)
                against.update(refuted)
        for place in (place for place in wrong if _about(plan[place]) == about):
            for more in (0, 1):  # one that is refuted as often as it fits is told if no other fits
                refuted = {cause for cause in fits if against[cause] >= fits[cause] + more}
                with refuting(frozenset(refuted)):
                    tests[place] = judged(lesson, answer, *pairs[place])
                if causes(tests[place].output)[1]:
                    break
    return numbered(likeliest(weighed(tests)))


def _about(drawn: Drawn) -> tuple[int, Judge, Program]:
    """Return what a case is about; where that differs, the same mistake gives something else."""
    return drawn.check.task.number, drawn.check.judge, drawn.check.program


def weighed(tests: Sequence[Graded]) -> list[Graded]:
    """Let what is wrong cost `LEAST` of its task: a misconception that shows in one case of many
    would else cost next to nothing. The cases that pass then count for less.
    """
    found = []
    for test in tests:
        of_task = [other for other in tests if other.check.task == test.check.task]
        most = sum(other.max_score for other in of_task)
        lost = most - sum(other.score for other in of_task)
        factor = 1.0
        if 0 < lost < LEAST * most:
            passed = test.status == PASSED
            factor = (1 - LEAST) * most / (most - lost) if passed else LEAST * most / lost
        found.append(test._replace(score=factor * test.score, max_score=factor * test.max_score))
    return found


def verdict(
    check: Check, case: Case, ran: Ran, answer: Answer
) -> tuple[str, str, Mapping[str, float]]:
    """Return the status, what to tell the student, and the figures of an answer that passes."""
    if not answer.may_lean and (sentence := leaning(check.task, ran.notes, case.ranks)):
        return LEANS, sentence, {}
    if ran.not_started:
        return NOT_STARTED, ran.not_started, {}
    if ran.failure:
        called = (
            f" (the call: {case.label})"
            if re.match(r"rank \d+ raised", ran.failure) and case.label
            else ""
        )
        return FAILED, ran.failure + called, {}
    try:
        figures = check.judge(case, ran.results, ran.notes) or {}
    except Wrong as wrong:
        return FAILED, str(wrong), {}
    except (
        Exception
    ) as error:  # whatever a student's data does to a judge must not end the grading of the others
        where, kind = place_of(traceback.extract_tb(error.__traceback__)[-1]), type(error).__name__
        if answer.may_lean:  # who writes checks wants to know where
            return FAILED, UNREADABLE.format(where, kind, error), {}
        return FAILED, UNUSABLE.format("the answer returned or left", kind, error), {}
    sent = [note.bytes for note in ran.notes if note.kind == "send"]
    return PASSED, "", {"messages sent": len(sent), "bytes sent": sum(sent), **figures}


def numbered(tests: list[Graded]) -> list[Graded]:
    """Number the tests by task: 1.1, 1.2, 2.1, ...

    If one case of a task leaned on what it may not, the task has no points, and all its cases say
    why.
    """
    found = {
        test.check.task.number: test.output for test in reversed(tests) if test.status == LEANS
    }
    result: list[Graded] = []
    for task in sorted({test.check.task.number for test in tests}):
        for number, test in enumerate(
            (test for test in tests if test.check.task.number == task), start=1
        ):
            if task in found:
                test = test._replace(score=0.0, status=FAILED, output=found[task])
            result.append(test._replace(number=f"{task}.{number}"))
    return result


def likeliest(tests: list[Graded]) -> list[Graded]:
    """Keep the causes that fit most cases of a task, where several fit one case: a small case may
    not tell them apart, and another one does.
    """
    fits = Counter(
        (test.check.task.number, cause) for test in tests for cause in causes(test.output)[1]
    )
    result = []
    for test in tests:
        said, found = causes(test.output)
        if len(found) > 1:
            often = [fits[test.check.task.number, cause] for cause in found]
            kept = [cause for cause, times in zip(found, often, strict=True) if times == max(often)]
            test = test._replace(output=said + COMES_OUT + OR_IF.join(kept[:TOLD]))
        result.append(test)
    return result


def causes(output: str) -> tuple[str, list[str]]:
    """Return a rejection without the causes that it names, and these."""
    said, names_some, rest = output.partition(COMES_OUT)
    return said, rest.split(OR_IF) if names_some else []


def printable(text: str) -> str:
    """Return a text that a terminal or an XML file can show: a student's error may hold any control
    character.
    """
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def is_handout(lesson: Lesson, answer: Answer) -> bool:
    """Tell whether the file is still the one that was handed out. One that is edited in its place
    has to be run.
    """
    given = lesson.folder / "exercise.py"
    if not given.is_file() or answer.path.resolve() == given.resolve():
        return False
    texts = [
        path.read_text(encoding="utf-8", errors="replace").split() for path in (answer.path, given)
    ]
    return texts[0] == texts[1]
