"""The grader with lesson 02: the reference scores everything, the handout nothing, each mistake
loses points.

What goes wrong is said in words: which rank, which index, where a rank waits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from hmac import digest
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import minidist
from minidist.__main__ import main
from minidist.course.grade import default_lessons
from minidist.course.grader import grading, record, runner
from minidist.course.grader.compare import Wrong, expect_close, expect_equal, expect_ranks, known
from minidist.course.grader.contract import Arrays, Case, Check, Note, Task
from minidist.course.grader.grading import AT_ONCE, NOT_STARTED, Graded, absent
from minidist.course.grader.report import as_json, totals
from minidist.course.grader.runner import collect, warm_processes
from minidist.course.grader.warm import Warm
from minidist.course.grader.watch import Watch
from minidist.course.grader.witness import Witness
from minidist.course.lesson import (
    Answer,
    Lesson,
    find_lesson,
    lessons_in,
    load_checks,
    reference_answer,
)
from minidist.full.comm import Communicator

LESSON = find_lesson(Path(__file__).parents[2] / "lessons", "02")
HONEST = """
import numpy as np

def ring_reduce_scatter(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    leaving = chunks[left].copy()
    for step in range(1, comm.size):
        own = chunks[(comm.rank - step - 1) % comm.size]
        arriving = np.empty_like(own)
        comm.exchange(leaving, right, arriving, left)
        leaving = arriving + own
    return leaving if comm.size > 1 else chunks[0].copy()

def ring_all_gather(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        comm.exchange(chunks[comm.rank - step], right, chunks[comm.rank - step - 1], left)

def ring_all_reduce(buffer, comm):
    chunks = np.array_split(buffer, comm.size)
    chunks[comm.rank][:] = ring_reduce_scatter(chunks, comm)
    ring_all_gather(chunks, comm)

def all_reduce_cost(elements, itemsize, ranks, rank):
    lengths = [elements // ranks + (i < elements % ranks) for i in range(ranks)]
    return 2 * (ranks - 1), (2 * elements - lengths[rank] - lengths[(rank + 1) % ranks]) * itemsize
"""


WITH_TORCH = find_lesson(LESSON.folder.parent, "12")
SHARED: dict[Path, Warm] = {}  # by lesson, what runs the cases of all tests here


@pytest.fixture(autouse=True, scope="module")
def shared() -> Iterator[None]:
    with (
        warm_processes([LESSON], AT_ONCE) as plain,
        warm_processes([WITH_TORCH], AT_ONCE) as with_torch,
    ):
        SHARED.update({LESSON.folder: plain, WITH_TORCH.folder: with_torch})
        yield
        SHARED.clear()


def grade(lesson: Lesson, of: Answer, **options: Any) -> list[Graded]:
    """Grade by processes that are shared, if they have imported enough, with patience: a machine
    may be busy.
    """
    return grading.grade(lesson, of, **{"warm": SHARED.get(lesson.folder), "limit": 60.0} | options)


def answer(folder: Path, source: str) -> Answer:
    """Write a student's file."""
    path = folder / "exercise.py"
    path.write_text(textwrap.dedent(source))
    return Answer(path)


def pick(task: int = 0, wire: str = "threads", title: str = "") -> Callable[[Check], bool]:
    """Choose checks, for `grade(only=...)`; what is not said does not matter."""
    return lambda check: (
        task in (0, check.task.number) and wire in ("", check.wire) and title in check.title
    )


def of_task(tests: list[Graded], number: int) -> list[Graded]:
    return [test for test in tests if test.check.task.number == number]


@pytest.mark.parametrize("seed", (1, pytest.param(2, marks=pytest.mark.soak)))
def test_other_seeds_draw_other_cases_and_an_honest_answer_passes_them(
    seed: int, tmp_path: Path
) -> None:
    tests = grade(LESSON, answer(tmp_path, HONEST), seed=seed, only=pick())
    assert [(test.name, test.output) for test in tests if test.score < test.max_score] == []
    plain = grade(LESSON, reference_answer(LESSON), seed=0, only=pick(task=4))
    assert {test.label for test in of_task(tests, 4)} != {test.label for test in plain}


def test_an_honest_answer_passes_under_mpirun(tmp_path: Path) -> None:
    assert all(
        test.score for test in grade(LESSON, answer(tmp_path, HONEST), only=pick(wire="mpi"))
    )


@pytest.mark.parametrize("wire", ("threads", pytest.param("mpi", marks=pytest.mark.soak)))
def test_where_no_case_is_forked_each_imports_for_itself(
    wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac, or under an mpirun that is not MPICH's."""
    monkeypatch.setattr(runner, "SUPPORTED", False)
    tests = grade(
        LESSON, answer(tmp_path, HONEST), only=pick(4 if wire == "threads" else 0, wire), warm=None
    )
    assert tests and [test.output for test in tests if test.score < test.max_score] == []


@pytest.mark.parametrize("wire", ("threads", "mpi"))
def test_what_a_task_imports_is_there_before_the_answer_is_called(
    wire: str, tmp_path: Path
) -> None:
    """Or its import would be watched, call by call. The search for garbage is on again by then."""
    source = """
        import gc, sys
        def MasterWeights(*_, **__):
            raise ValueError("torch._dynamo" in sys.modules, gc.isenabled())
    """
    tests = grade(WITH_TORCH, answer(tmp_path, source), only=pick(3, wire))
    assert tests and all(
        "ValueError" in test.output and "(True, True)" in test.output for test in tests
    )


@pytest.mark.skipif(sys.platform != "linux", reason="cases are forked on Linux")
@pytest.mark.parametrize(
    ("line", "there"), (("if 1:\n    from torch import nn", True), ("# import torch", False))
)
def test_torch_is_imported_once_for_an_answer_that_imports_it(
    line: str, there: bool, tmp_path: Path
) -> None:
    """In a lesson of numpy, too; or each of its cases would take seconds for that, of its limit."""
    source = f"import sys\nthere = 'torch' in sys.modules\n{line}\nraise ValueError(there)"
    tests = grade(LESSON, answer(tmp_path, source), only=pick(task=4), warm=None)
    assert tests and all(f": {there}" in test.output for test in tests)


@pytest.mark.skipif(sys.platform != "linux", reason="cases are forked on Linux")
def test_a_warm_process_keeps_no_descriptor_of_a_case(tmp_path: Path) -> None:
    """Or it runs out of them after a thousand cases."""
    assert grade(LESSON, answer(tmp_path, HONEST), only=pick(task=4))
    importer = SHARED[LESSON.folder].importer
    assert importer is not None
    kinds = [
        os.readlink(file).partition(":")[0] for file in Path(f"/proc/{importer.pid}/fd").iterdir()
    ]
    assert kinds.count("socket") == 1 and "anon_inode" not in kinds, (
        "that which listens, and no case's"
    )


@pytest.mark.parametrize("copied", (False, True))
def test_the_handout_is_not_started(copied: bool, tmp_path: Path) -> None:
    handout = LESSON.folder / "exercise.py"
    tests = grade(LESSON, answer(tmp_path, handout.read_text()) if copied else Answer(handout))
    assert totals(tests) == (0, 100)
    assert {test.status for test in tests} == {NOT_STARTED}
    assert not any("Traceback" in test.output for test in tests)


def test_a_stub_is_not_started_beside_a_task_that_is(tmp_path: Path) -> None:
    source = HONEST.replace(
        "chunks = np.array_split(buffer",
        "raise NotImplementedError('task 3 is not started')\n    #",
    )
    tests = grade(LESSON, answer(tmp_path, source), only=pick())
    assert {(test.status, test.output) for test in of_task(tests, 3)} == {
        (NOT_STARTED, "task 3 is not started")
    }
    assert all(
        test.score == test.max_score for number in (1, 2, 4) for test in of_task(tests, number)
    )


def test_partial_credit_per_case(tmp_path: Path) -> None:
    source = HONEST + "\nring = ring_reduce_scatter\ndef ring_reduce_scatter(chunks, comm):\n"
    tests = grade(
        LESSON,
        answer(tmp_path, source + "    return ring(chunks, comm) + (comm.size == 3)"),
        only=pick(task=1, wire=""),
    )
    assert {test.status for test in tests if test.label.startswith("3 ranks")} == {"failed"}
    assert {test.status for test in tests if not test.label.startswith("3 ranks")} == {"passed"}
    assert 0 < sum(test.score for test in tests) < sum(test.max_score for test in tests)


# ---------------------------------------------------------------- what the student reads


def test_a_wrong_value_is_named_by_rank_and_index(tmp_path: Path) -> None:
    source = (
        HONEST
        + "\nring = ring_all_reduce\ndef ring_all_reduce(buffer, comm):\n    ring(buffer, comm)\n"
    )
    tests = grade(
        LESSON, answer(tmp_path, source + "    buffer[3:4] -= comm.rank == 1"), only=pick(task=3)
    )
    said = r"rank 1: after the call the caller's buffer\[3\] is (\d+)\.0, expected (\d+)\.0"
    assert re.fullmatch(said, tests[0].output)
    with pytest.raises(Wrong, match=r"rank 2: x has shape \(3,\), expected \(2,\)"):
        expect_equal(2, "x", np.ones(3), np.ones(2))
    with pytest.raises(Wrong, match="rank 0: x is nan, expected 1"):
        expect_equal(0, "x", np.asarray(np.nan), np.asarray(1.0))


SEVEN = ": it is right to seven digits, as if it had been rounded to float32 on the way"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([4.0, 8.0], "rank 3: x[1] is 8, expected 2: all of it is 4 times that"),
        ([0.25, 0.5], "rank 3: x[1] is 0.5, expected 2: all of it is 1/4 of that"),
        ([4.0, 9.0], "rank 3: x[1] is 9, expected 2"),
        ([-1.0, -2.0], "rank 3: x[1] is -2, expected 2: all of it has the other sign"),
        (
            [0.0, 0.0],
            "rank 3: x[1] is 0, expected 2: all of it is 0, as if nothing had been written",
        ),
        (
            [np.nan, 8.0],
            "rank 3: x[0] is nan, expected 1: 1 of its 2 values are infinite or not a number",
        ),
        ([2.0, 1.0], "rank 3: x[0] is 2, expected 1: these are the right values in another order"),
        ([1.0, 2.0 + 1e-7], "rank 3: x[1] is 2.0000001, expected 2" + SEVEN),
        ([7.0, 5.0], "rank 3: x[0] is 7, expected 1: it is still what was given"),
        ([6.0, 2.5], "rank 3: x[0] is 6, expected 1: that is what rank 0 should have"),
        (
            [3.0, 3.5],
            "rank 3: x[0] is 3, expected 1: this is what comes out if each rank divides by its "
            "own count",
        ),
        ([9.0, 9.5], "rank 3: x[0] is 9, expected 1"),
    ],
)
def test_what_a_wrong_value_looks_like_is_told(found: list[float], said: str) -> None:
    instead = {
        "nothing is divided": np.array([1.0, 1.0]),
        "each rank divides by its own count": lambda: np.array([3.0, 3.5]),
        "it is all zero": lambda: np.zeros(3),
    }
    others = [np.array([6.0, 2.5]), np.zeros(2), np.zeros(2), np.array([1.0, 2.0])]
    others = others if found[1] == 2.5 else []
    with pytest.raises(Wrong) as wrong:
        expect_close(
            3,
            "x",
            np.array(found),
            np.array([1.0, 2.0]),
            instead=instead,
            others=others,
            before=BEFORE,
        )
    assert str(wrong.value) == said
    expect_close(
        3,
        "x",
        np.array([1.0, 2.0]),
        np.array([1.0, 2.0]),
        instead={"it is asked for": lambda: 1 / 0},
    )


BEFORE = np.array([7.0, 5.0])


def test_a_known_mistake_is_told_also_of_what_is_no_array() -> None:
    instead = {"ranks are counted from 1": [1, 2], "the last is forgotten": lambda: [0]}
    assert known(instead, [0].__eq__) == ": this is what comes out if the last is forgotten"
    assert known(instead, [7].__eq__) == ""


def judged(*pairs: tuple[float, float]) -> list[Graded]:
    """Grade cases of one check: of each what is given, and what was found. Right is what is given."""

    def judge(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
        x, found = float(case.given[0]["x"]), results[0]["x"]
        instead = {
            "it is a": x + 2,
            "it is b": 4.0 if x == 2 else x,
            "it is c": 2.0 + x if x else 2.0,
            "it is d": lambda: 2 * x,
        }
        expect_close(0, "x", found, np.array(x), instead=instead)

    def program(exercise: ModuleType, comm: Communicator, given: Arrays) -> Arrays:
        return given

    check = Check(Task(1, "a task"), "a check", 10, lambda rng: (), program, judge)
    plan = [
        grading.Drawn(0, check, Case(({"x": np.array(x)},), f"{x:g}"), 10 / len(pairs))
        for x, _ in pairs
    ]
    rans = [runner.Ran(results=({"x": np.array(found)},)) for _, found in pairs]
    return grading.together(LESSON, reference_answer(LESSON), plan, rans)


def test_the_mistake_that_fits_most_cases_is_told_also_if_it_is_the_fourth_that_fits() -> None:
    said = "rank 0: x is {}, expected {}: this is what comes out if it is d"
    tests = judged((2.0, 4.0), (3.0, 6.0))
    assert [test.output for test in tests] == [said.format(4, 2), said.format(6, 3)]


def test_a_mistake_is_not_told_that_would_have_failed_cases_that_pass() -> None:
    small, alone, _ = judged((2.0, 4.0), (0.0, 0.0), (0.0, 0.0))
    assert alone.score == alone.max_score
    assert small.output.endswith("comes out if it is b, or if it is d")


def test_what_is_wrong_costs_a_tenth_of_its_task() -> None:
    """However many cases there are; all of them together give what the task gives."""
    tests = judged((2.0, 4.0), *[(3.0, 3.0)] * 19)
    assert sum(test.score for test in tests) == pytest.approx(9)
    assert sum(test.max_score for test in tests) == pytest.approx(10)
    assert sum(test.score for test in judged((2.0, 4.0), (3.0, 3.0))) == 5


def test_a_transposed_array_and_another_rank_s_are_told() -> None:
    square, wide = np.array([[1, 2], [3, 4]]), np.array([[1.0, 2.0, 3.0]])
    with pytest.raises(Wrong, match=r"rank 0: x\[0, 1\] is 3, expected 2: it is transposed"):
        expect_equal(0, "x", square.T, square)
    with pytest.raises(Wrong, match=r"x has shape \(3, 1\), expected \(1, 3\): it is transposed"):
        expect_close(0, "x", wide.T, wide)
    with pytest.raises(
        Wrong,
        match=r"x has shape \(3,\), expected \(1, 3\): the values are right, the shape is not",
    ):
        expect_close(0, "x", wide[0], wide)
    ranks = [np.array([1.0]), np.array([5.0])]
    with pytest.raises(
        Wrong, match=r"rank 1: x\[0\] is 1, expected 5: that is what rank 0 should have"
    ):
        expect_ranks("x", [ranks[0], ranks[0]], ranks)
    with pytest.raises(
        Wrong,
        match=r"rank 1: x\[0\] is 3.0, expected 5.0: this is what comes out if ranks add up less",
    ):
        expect_ranks(
            "x",
            [ranks[0], np.array([3.0])],
            ranks,
            0,
            instead={"ranks add up less": lambda: [[2], [3.0]]},
        )
    expect_ranks("x", ranks, ranks, 0, before=ranks)
    # rank 0's are zeros, which an order of sums may make 1e-17
    zeros = [np.zeros(2), np.array([1.0, 2.0])]
    expect_ranks("x", [zeros[0] + 8e-17, zeros[1]], zeros)
    with pytest.raises(Wrong, match="expected 0"):
        expect_ranks("x", [zeros[0] + 1e-13, zeros[1]], zeros)


def test_a_deadlock_is_told_by_who_waits_where() -> None:
    mistake = reference_answer(LESSON, "mistakes/send_before_receive.py")
    tests = grade(LESSON, mistake, only=pick(task=2))
    assert "each waits for the next" in tests[0].output
    assert re.search(
        r"rank 0 waits: send to rank 1 .* at exercise.py:\d+ in ring_all_gather", tests[0].output
    )


@pytest.mark.parametrize("wire", ("threads", "mpi"))
def test_a_hang_is_told_by_line(wire: str, tmp_path: Path) -> None:
    source = """
    def ring_all_gather(chunks, comm):
        while comm.rank == 0:  # line 3
            pass  # line 4
        comm.recv(chunks[0], 0)  # line 5
    """
    tests = grade(LESSON, answer(tmp_path, source), only=pick(task=2, wire=wire), limit=0.7)
    place = r"rank 0 is still at exercise.py:[34] in ring_all_gather, rank 1 waits at exercise.py:5 in ring_all_gather"
    assert all(test.score == 0 for test in tests)
    assert re.search(place, tests[0].output), tests[0].output


@pytest.mark.parametrize("where", ("in one task", "in the file"))
def test_after_three_cases_that_hang_the_rest_is_not_tried(where: str, tmp_path: Path) -> None:
    """Of this task, or of all if the file itself does not end; the first ones say where."""
    in_task = HONEST + "\ndef ring_all_gather(chunks, comm):\n    while True: pass\n"
    source = in_task if where == "in one task" else "while True: pass\n"
    tests = grade(LESSON, answer(tmp_path, source), only=pick(wire="threads"), limit=0.7)
    hung = of_task(tests, 2) if where == "in one task" else tests
    assert all("it did not end within" in test.output for test in hung[:3]) and len(hung) > 5
    assert {test.output for test in hung[3:]} == {grading.NOT_TRIED}
    assert sum(test.score for test in hung) == 0
    tried = [test.output != grading.NOT_TRIED for test in of_task(tests, 1)[3:]]
    assert tried and all(tried) == (where == "in one task")


def test_an_error_is_told_by_rank_and_line_without_a_traceback(tmp_path: Path) -> None:
    source = (
        HONEST
        + "\ndef ring_all_gather(chunks, comm):\n    if comm.rank == 1:\n        chunks[99]\n"
    )
    tests = grade(LESSON, answer(tmp_path, source), only=pick(task=2, wire=""))
    line = len(source.splitlines())
    told = (
        f"rank 1 raised IndexError at exercise.py:{line} in ring_all_gather: list index out of "
        "range"
    )
    assert {test.output for test in tests} == {f"{told} (the call: {test.label})" for test in tests}


@pytest.mark.parametrize(
    ("source", "told"),
    (
        ("def f(:", "rank 0 raised SyntaxError at exercise.py:1"),
        ("x = 1", "rank 0: exercise.py has no ring_all_gather: the handout does"),
        ("import minidist.nothing", "ModuleNotFoundError at exercise.py:1"),
        (
            "def ring_all_gather(chunks, comm): raise ValueError('\\x1b[2J\\0')",
            "ValueError at exercise.py:1 in ring_all",
        ),
    ),
)
def test_a_file_that_cannot_be_used_is_told_so(source: str, told: str, tmp_path: Path) -> None:
    tests = grade(LESSON, answer(tmp_path, source), only=pick(task=2))
    assert all(
        test.score == 0 and told in test.output and test.output.isprintable() for test in tests
    ), tests[0].output


def test_an_error_of_the_checks_tells_what_they_cannot_use(tmp_path: Path) -> None:
    """In a judge, in a program, or in what a program hands to the answer, whose line is then
    named. It is the check's own fault only if the answer has not been called.
    """
    source = "def f(give):\n    return give()\ndef ring_all_gather(x):\n    return x\n"
    lesson_file = """
        import numpy as np
        from minidist.course.grader.contract import Case, Check, Task
        def once(rng): return [Case(({},), "one")]
        def good(exercise, comm, given): return {"x": exercise.f(lambda: 1)}
        def within(exercise, comm, given): return {"x": exercise.f(lambda: {}["key"])}
        def bad(exercise, comm, given): return {"x": exercise.f(lambda: [1, 2])[5]}
        def stub(exercise, comm, given): raise NotImplementedError("of the check's own")
        def judge(case, results, notes): results[0]["y"]
        CHECKS = [Check(Task(1, "t"), f.__name__, 1, once, f, judge) for f in (good, within, bad, stub)]
    """
    (tmp_path / "checks.py").write_text(textwrap.dedent(lesson_file))
    lesson = Lesson(tmp_path, tuple(load_checks(tmp_path / "checks.py")))
    (tmp_path / "student").mkdir()
    judged, called, returned, stub = (
        test.output for test in grade(lesson, answer(tmp_path / "student", source))
    )
    asked = "are type, shape and dtype those that the docstring says?"
    cannot = r"the check cannot use what"
    assert re.fullmatch(
        rf"{cannot} the answer returned or left \(KeyError: 'y'\): {re.escape(asked)}", judged
    )
    assert called == "rank 0 raised KeyError at exercise.py:2 in f: 'key' (the call: one)"
    assert re.fullmatch(
        rf"rank 0: {cannot} f returned or left \(IndexError: .*\): {re.escape(asked)}", returned
    )
    assert "checks.py:8 in stub (NotImplementedError of a library: of the check's own)" in stub


def test_none_and_other_arguments_are_told_as_the_answer_s_doing(tmp_path: Path) -> None:
    """They raise in a line of the checks, where the answer is none."""
    lesson_file = """
        from minidist.course.grader.contract import Case, Check, Task
        def once(rng): return [Case(({},), "one")]
        def nothing(exercise, comm, given): return {"x": float(exercise.f(1))}
        def arguments(exercise, comm, given): return {"x": exercise.f(1, 2)}
        def own(exercise, comm, given): return {"x": exercise.f(1) or once()}
        def judge(case, results, notes): pass
        CHECKS = [Check(Task(1, "t"), f.__name__, 1, once, f, judge) for f in (nothing, arguments, own)]
    """
    (tmp_path / "checks.py").write_text(textwrap.dedent(lesson_file))
    lesson = Lesson(tmp_path, tuple(load_checks(tmp_path / "checks.py")))
    (tmp_path / "student").mkdir()
    nothing, arguments, own = (
        test.output for test in grade(lesson, answer(tmp_path / "student", "def f(x):\n    pass\n"))
    )
    assert nothing.startswith("rank 0: the check meets None where a value is expected (float()")
    assert nothing.endswith(
        "and f returned None: does it return, or leave, what its docstring says?"
    )
    assert arguments.startswith(
        "rank 0: f() takes 1 positional argument but 2 were given: keep the arguments as they"
    )
    assert own.startswith(
        "rank 0: the check cannot use what f returned or left (TypeError: once() missing 1 required"
    )


def test_a_function_that_returns_nothing_is_told_so(tmp_path: Path) -> None:
    source = HONEST.replace("return leaving if", "leaving if")
    tests = grade(LESSON, answer(tmp_path, source), only=pick(task=1))
    assert "shard is NoneType, expected numbers: is the result returned?" in tests[0].output


def test_what_a_stream_sends_is_witnessed() -> None:
    notes: list[Note] = []

    def program(comm: Communicator) -> None:
        witness = Witness(
            comm.wire, notes.append, Watch(Task(1, "t"), __file__, "no lesson", notes.append)
        )
        stream = Communicator(witness, comm.ledger.of_group()).stream()
        stream.launch(
            stream.comm.exchange, np.ones(2), 1 - comm.rank, np.zeros(2), 1 - comm.rank
        ).wait()

    minidist.run(program, 2)
    assert sorted((note.kind, note.rank, note.to, note.bytes) for note in notes) == [
        ("send", 0, 1, 16),
        ("send", 1, 0, 16),
    ]


# ---------------------------------------------------------------- the command line


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(["grade", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_json_has_the_fields_and_the_exit_status_tells_full_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(["02", "--solution", "--format", "json"], capsys)
    whole = json.loads(out)
    assert (status, whole["score"], whole["max_score"]) == (0, 100, 100)
    fields = {"name", "number", "score", "max_score", "status", "output", "visibility"}
    assert all(test.keys() == fields for test in whole["tests"])
    assert {test["visibility"] for test in whole["tests"]} == {"visible", "hidden"}
    assert sum(test["score"] for test in whole["tests"]) == pytest.approx(100)
    answer(tmp_path, HONEST.replace("2 * (ranks - 1), (", "ranks, ("))
    status, out, _ = run(
        ["2", "--student", str(tmp_path), "--format", "json", "--seed", "5"], capsys
    )
    assert (status, json.loads(out)["score"]) == (1, 85)


def test_table_and_junit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(tmp_path, "def all_reduce_cost(*_): raise ValueError('<no> & \\x00')")
    status, out, _ = run(["02", "--student", str(tmp_path)], capsys)
    assert (
        status == 1
        and "0 of 100 points" in out
        and "4.1" in out
        and "exercise.py:1 in all_reduce_cost" in out
    )
    run(
        [
            "02",
            "--task",
            "4",
            "--student",
            str(tmp_path),
            "--format",
            "junit",
            "--out",
            str(tmp_path / "junit.xml"),
        ],
        capsys,
    )
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert (suite.get("name"), suite.get("failures"), suite.get("skipped")) == (
        LESSON.name,
        suite.get("tests"),
        "0",
    )


def test_one_task_while_working_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(["02", "--task", "4", "--solution"], capsys)
    assert status == 0 and "its cost" in out and "ring all-gather" not in out


def test_a_results_file_for_gradescope_is_written_even_if_nothing_can_be_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    options = ["02", "--student", str(tmp_path), "--format", "gradescope", "--out", str(results)]
    for more, told in (
        ([], "there is no exercise.py"),
        (["--user", "nobody-is-called-so"], "there is no user 'nobody-is-called-so'"),
    ):
        results.unlink(missing_ok=True)
        status, _, said = run([*options, *more], capsys)
        assert status == 2 and said.count("\n") == 1 and told in said
        assert json.loads(results.read_text())["score"] == 0
        assert told in json.loads(results.read_text())["output"] and "--student" not in said
    (tmp_path / "exercise.py").write_text((LESSON.folder / "exercise.py").read_text())
    assert run(options, capsys)[0] == 1
    whole = json.loads(results.read_text())
    assert whole["score"] == 0 and {test["output"] for test in whole["tests"]} == {"not started"}


def test_points_of_a_lesson_add_up_exactly() -> None:
    """Also where cases share 10 points by three, and a sum is taken of what was rounded."""
    for folder in lessons_in(LESSON.folder.parent):
        lesson = find_lesson(folder.parent, folder.name)
        whole = json.loads(as_json(absent(lesson, "nothing")), parse_float=Decimal)
        expected = sum(Decimal(str(check.points)) for check in lesson.checks)
        assert sum(test["max_score"] for test in whole["tests"]) == expected, folder.name


def test_all_lessons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "lessons"
    (folder / LESSON.name).mkdir(parents=True)
    for part in ("checks.py", "judges*.py", "exercise.py"):
        for file in LESSON.folder.glob(part):
            (folder / LESSON.name / file.name).write_text(file.read_text())
    status, out, _ = run(["--all", "--lessons", str(folder)], capsys)
    assert status == 1 and out.startswith(LESSON.name) and out.count("not started") > 20


def test_of_all_lessons_one_without_an_answer_has_0_points_and_the_others_are_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lessons = tmp_path / "lessons"
    for name in (LESSON.name, "01_ranks"):
        (lessons / name).mkdir(parents=True)
        for part in ("checks.py", "judges*.py", "exercise.py"):
            for file in (LESSON.folder.parent / name).glob(part):
                (lessons / name / file.name).write_text(file.read_text())
    folder = tmp_path / "student" / LESSON.name
    folder.mkdir(parents=True)
    answer(folder, HONEST)
    argv = ["--all", "--simulated", "--lessons", str(lessons), "--student", str(folder.parent)]
    status, out, told = run([*argv, "--format", "json"], capsys)
    grades = json.loads(out)
    why = f"there is no exercise.py of lesson 01_ranks in {folder.parent}"
    assert status == 2 and told.startswith(f"minidist grade: 0 points, as {why}")
    missing = [test for test in grades["tests"] if test["output"].startswith(why)]
    assert sum(test["max_score"] for test in missing) > 80
    assert grades["score"] == grades["max_score"] - sum(test["max_score"] for test in missing)


@pytest.mark.parametrize(
    ("argv", "told"),
    (
        (["99"], "there is no lesson '99' in"),
        (["02", "--task", "9"], "02 has no task 9: leave --task out"),
        (
            ["02", "--student", "/nowhere"],
            "there is no exercise.py of lesson 02_ring_all_reduce in /nowhere",
        ),
        (["--all", "--lessons", "/nowhere"], "there are no lessons in /nowhere"),
        (
            ["02", "--task", "4", "--solution", "--limit", "9", "--out", "/nowhere/x.json"],
            "/nowhere/x.json",
        ),
    ),
)
def test_bad_input_is_one_sentence_and_status_2(
    argv: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any case has run."""
    monkeypatch.setattr("minidist.course.grader.grading.run_case", None)
    status, out, said = run(argv, capsys)
    assert (status, out, said.count("\n")) == (2, "", 1) and told in said


def test_a_file_that_is_too_large_for_an_answer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each case would copy it, and the grader itself read it: here 64 GiB, as a sparse file."""
    with (tmp_path / "exercise.py").open("w") as file:
        file.truncate(64 << 30)
    status, out, said = run(["02", "--student", str(tmp_path)], capsys)
    assert (status, out) == (2, "") and "has 68,719,476,736 bytes, an answer at most" in said


@pytest.mark.parametrize(
    "argv",
    (
        [],
        ["02", "--all"],
        ["02", "--seed", "-1"],
        ["02", "--limit", "0"],
        ["02", "--format", "x"],
        ["--all", "--package"],
    ),
)
def test_a_command_line_that_says_nothing_clear_is_refused(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["grade", *argv])
    said = capsys.readouterr().err
    assert said.startswith("minidist grade: ") and said.count("\n") == 1


def test_the_default_lessons_are_this_checkout_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_lessons() / LESSON.name == LESSON.folder


# ---------------------------------------------------------------- records


def test_a_record_is_data_and_nothing_else(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "empty": np.empty(0, np.int64),
        "one": np.asarray(7),
    }
    record.write(tmp_path / "r", {"nonce": "x"}, arrays)
    facts, back = record.read(tmp_path / "r")
    assert facts == {"nonce": "x"} and all(
        np.array_equal(arrays[name], back[name]) for name in arrays
    )
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    bad = '{{"nonce": "x", "arrays": {{"a": ["{}", [{}], "AAAAAAAAAAA="]}}}}'  # eight bytes
    for name, text in {
        "cut": (tmp_path / "r").read_bytes().partition(b"\n")[2][:-1],
        "object": bad.format("|O", 1).encode(),
        "huge": bad.format("<f8", 99999999999).encode(),
        "negative": bad.format("<f8", -1).encode(),
        "list": b"[1, 2]\n",
        "text": b"PASS",
        "deep": b"[" * 100_000,
    }.items():
        (tmp_path / name).write_bytes(digest(b"", text, "sha256").hex().encode() + b"\n" + text)
    for name in (
        "cut",
        "object",
        "huge",
        "negative",
        "list",
        "text",
        "deep",
        "fifo",
        "link",
        "missing",
    ):
        with pytest.raises(record.BadRecord):
            record.read(tmp_path / name)


def test_a_result_for_which_no_record_has_room_is_told_so(tmp_path: Path) -> None:
    """And not that a process has ended."""
    source = """
    import numpy as np
    def all_reduce_cost(elements, *_):
        return np.zeros(record_size)
    """.replace("record_size", str(record.LARGEST // 8))
    tests = grade(LESSON, answer(tmp_path, source), only=pick(task=4, title="fewer"))
    assert re.search(r"rank 0: \w+ has shape \(5, \d+\): no answer to this", tests[0].output), tests


def test_only_a_record_that_bears_the_nonce_counts(tmp_path: Path) -> None:
    facts = {"done": True, "error": None, "notes": []}
    record.write(tmp_path / "record-0", facts, {"a": np.ones(1)}, "of this run")
    assert collect(tmp_path, ["of this run"], limit=1).results[0]["a"] == 1
    assert "rank 0 left no record" in collect(tmp_path, ["of another run"], limit=1).failure
    assert (
        "rank 1 left no record"
        in collect(tmp_path, ["of this run", "of this run"], limit=1).failure
    )
    text = (tmp_path / "record-0").read_bytes()
    (tmp_path / "record-0").write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    assert "rank 0 left no record" in collect(tmp_path, ["of this run"], limit=1).failure, (
        "it was changed"
    )
    record.write(tmp_path / "record-0", {**facts, "notes": [{"rank": 0}]}, {}, "of this run")
    assert "rank 0 left no record" in collect(tmp_path, ["of this run"], limit=1).failure


def test_ranks_that_start_at_the_same_moment_are_all_watched() -> None:
    """Python lets one thread at a time change who looks at its calls, and refuses the others."""
    program = """
import sys, threading
from minidist.course.grader.contract import Task
from minidist.course.grader.watch import Watch

failed, watch = [], Watch(Task(1, "any"), "/nowhere/exercise.py", "/nowhere", print)
threading.excepthook = lambda failure: failed.append(failure.exc_value)
sys.setswitchinterval(1e-6)
watch.begin()


def rank():
    assert sys.getprofile() is watch.calls
    watch.switch(None)


for _ in range(10):
    threads = [threading.Thread(target=rank) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(failed)
"""
    outcome = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (outcome.stdout, outcome.stderr) == ("[]\n", "")


def test_to_look_at_the_package_imports_nothing() -> None:
    """Packages import all that they export when they are asked for a name, and each case looks at
    them.
    """
    program = """
        import sys
        import minidist.full
        from minidist.course.grader.child import check_untouched, seal
        before = set(sys.modules)
        check_untouched(seal())
        assert set(sys.modules) == before, set(sys.modules) - before
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
