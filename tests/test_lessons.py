"""Every lesson: its reference scores everything, its handout nothing, its mistakes lose points, its text is true."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import mpirun, torchrun

from minidist.grade.grading import AT_ONCE, FAILED, NOT_STARTED, grade
from minidist.grade.lesson import Answer, Lesson, find_lesson, lessons_in, reference_answer
from minidist.grade.report import totals
from minidist.grade.runner import warm_processes
from minidist.grade.warm import Warm

ROOT = Path(__file__).parents[1]
FOLDERS = lessons_in(ROOT / "lessons")
NAMES = [folder.name for folder in FOLDERS]
MISTAKES = [(folder.name, path.stem) for folder in FOLDERS for path in sorted(folder.glob("mistakes/*.py"))]
PARTS = ("README.md", "exercise.py", "solution.py", "checks.py", "cluster.py")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@functools.cache
def load(name: str) -> Lesson:
    return find_lesson(ROOT / "lessons", name)


@pytest.fixture(scope="module")
def warm(request: pytest.FixtureRequest) -> Iterator[tuple[Lesson, Warm]]:
    """A lesson, and processes that have imported what it needs: shared by all tests of its mistakes."""
    lesson = load(request.param)
    with warm_processes(lesson, AT_ONCE) as processes:
        yield lesson, processes


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_is_whole(name: str) -> None:
    folder = ROOT / "lessons" / name
    assert [part for part in PARTS if not (folder / part).is_file()] == []
    assert (ROOT / "notebooks/src" / f"{name}.py").is_file() and (ROOT / "notebooks" / f"{name}.ipynb").is_file()
    tasks = {check.task.number for check in load(name).checks}
    about = [number for lesson, mistake in MISTAKES if lesson == name for number in [task_of(name, mistake)]]
    assert tasks == set(range(1, len(tasks) + 1)) and 2 <= len(tasks) <= 5
    assert set(about) == tasks and len(about) >= 5, "at least five mistakes, one for each task"
    assert len((folder / "cluster.py").read_text().splitlines()) < 100
    assert any(check.hidden for check in load(name).checks)


def task_of(lesson: str, mistake: str) -> int:
    """Return which task a mistake is about: its first line says that, and what is wrong."""
    said = re.match(r"# task (\d): .{20}", (ROOT / "lessons" / lesson / "mistakes" / f"{mistake}.py").read_text())
    assert said, "the first line is `# task N: what is wrong`"
    return int(said[1])


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_scores_everything(name: str) -> None:
    tests = grade(load(name), reference_answer(load(name)))
    assert [(test.name, test.output) for test in tests if test.score < test.max_score] == []
    assert any(test.check.wire == "mpi" for test in tests)


@pytest.mark.parametrize("name", NAMES)
def test_other_seeds_draw_other_cases(name: str) -> None:
    tests = grade(load(name), reference_answer(load(name)), seed=7, only=lambda check: check.wire == "threads")
    assert [(test.name, test.output) for test in tests if test.score < test.max_score] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_handout_is_not_started(name: str, tmp_path: Path) -> None:
    handout = tmp_path / "exercise.py"
    handout.write_text((load(name).folder / "exercise.py").read_text() + "\nchanged = True\n")
    tests = grade(load(name), Answer(handout), only=lambda check: check.wire == "threads")
    assert totals(tests)[0] == 0
    assert {(test.status, test.output) for test in tests} == {
        (NOT_STARTED, f"task {test.check.task.number} is not started") for test in tests
    }


@pytest.mark.parametrize("name", NAMES)
def test_leaning_on_the_package_s_own_answer_scores_nothing(name: str) -> None:
    """The solution, handed in by a student, is just that."""
    tests = grade(load(name), Answer(load(name).folder / "solution.py"), only=lambda check: check.wire == "threads")
    leaned = [test for test in tests if test.check.task.not_from]
    assert leaned and all(test.score == 0 and "is to be built by hand, but" in test.output for test in leaned)


@pytest.mark.parametrize(("warm", "mistake"), MISTAKES, indirect=["warm"], ids=[f"{a}-{b}" for a, b in MISTAKES])
def test_a_mistake_loses_points_on_the_task_it_is_about(warm: tuple[Lesson, Warm], mistake: str) -> None:
    lesson, processes = warm
    number = task_of(lesson.name, mistake)
    tests = grade(
        lesson,
        reference_answer(lesson, f"mistakes/{mistake}.py"),
        limit=3.0,
        only=lambda check: check.task.number == number and check.wire == "threads",
        warm=processes,
    )
    lost = [test for test in tests if test.score < test.max_score]
    assert lost and {test.status for test in lost} == {FAILED}
    assert not any("raised" in test.output or "cannot be read" in test.output for test in lost), "it does not crash"


@pytest.mark.parametrize("name", NAMES)
def test_the_exercise_runs_as_handed_out(name: str) -> None:
    outcome = mpirun(2, ROOT / "lessons" / name / "exercise.py")
    assert outcome.returncode == 0, outcome.stderr
    tasks = sorted({check.task.number for check in load(name).checks})
    assert outcome.stdout.splitlines() == [f"task {number}: task {number} is not started" for number in tasks]


@pytest.mark.parametrize("name", NAMES)
def test_the_text_prints_what_it_says(name: str) -> None:
    """Python blocks run one after the other; a plain block right below one is what it prints."""
    blocks = BLOCK.findall((ROOT / "lessons" / name / "README.md").read_text())
    space: dict[str, Any] = {"__name__": "lesson"}
    shown = 0
    for (language, code), (after, text) in zip(blocks, [*blocks[1:], ("end", "")], strict=True):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, f"{name}/README.md", "exec"), space)
            if after == "":
                assert [line.rstrip() for line in printed.getvalue().splitlines()] == text.splitlines()
                shown += 1
    assert shown, "a lesson shows what the reader's own run prints"


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Return what each rank tells of every twin, on 2 and on 4 ranks."""
    told = {}
    for ranks in (2, 4):
        out = tmp_path_factory.mktemp("twins") / "losses.json"
        paths = [str(folder / "cluster.py") for folder in FOLDERS]
        outcome = torchrun(ranks, ROOT / "tests" / "twins.py", str(out), *paths, timeout=110)
        print(outcome.stderr)
        assert outcome.returncode == 0
        told[ranks] = json.loads(out.read_text())
    return told


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("name", NAMES)
def test_both_twins_give_the_same_losses(name: str, ranks: int, losses: dict[int, list[dict[str, Any]]]) -> None:
    first = losses[ranks][0][name]
    assert len(first["ours"]) >= 3 and first["ours"][-1] < first["ours"][0], "it trains"
    for told in losses[ranks]:
        np.testing.assert_allclose(told[name]["ours"], told[name]["production"], rtol=first["tolerance"])
        assert told[name]["ours"] == first["ours"], "the same on every rank"
