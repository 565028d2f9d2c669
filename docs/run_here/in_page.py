"""What the page `run.html` asks the package for: this file runs in Pyodide, beside it.

    answer('{"do": "run", "with": {"text": "...", "ranks": 4, "clock": ""}}')     JSON in, JSON out

The page knows nothing of ranks, and the package nothing of the page: what is between them is here.
What a program prints goes straight to the page.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minidist.cli.plan import answer as bills
from minidist.cli.plan.command import amount, parser, planned
from minidist.course.grader import report
from minidist.course.here import grade_here, visible
from minidist.course.lesson import Answer, find_lesson
from minidist.draw.pipeline import draw_svg, draw_text
from minidist.draw.player import player
from minidist.draw.recording import MOST_RANKS, record
from minidist.full.comm import Cluster, Communicator
from minidist.full.options import read_number
from minidist.full.pipeline import (
    ScheduleError,
    check,
    peak_activations,
    peak_deferred,
    plan,
    read_plan,
    simulate,
)
from minidist.plan.device import PlanError

HERE = Path(__file__).parent
LESSONS = HERE / "lessons"
DESK = Path.cwd()  # where the reader's files lie
GAP = "\N{NO-BREAK SPACE}"
MOST_CELLS = 20_000  # of a schedule: a larger picture than a page can hold
CLOCKS: dict[str, Callable[[], Cluster | None]] = {
    "": lambda: None,
    "h100": lambda: Cluster.h100(nodes=2),
    "spread": lambda: Cluster.uniform(10e-6, 12.5e9),
}
ABSENT = {
    "torch": "torch has no version for browsers",
    "mpi4py": "a browser starts no other process, so there is no MPI",
    "triton": "a browser's Python has no GPU",
}


class Refused(ValueError):
    """The page is told one sentence."""


def answer(question: str) -> str:
    """Do what is asked; `failed` says in words why it could not be done."""
    asked = json.loads(question)
    begun = time.perf_counter()
    try:
        found = DO[asked["do"]](**asked["with"])
    except (Refused, PlanError, ScheduleError) as error:
        found = {"failed": str(error)}
    return json.dumps(found | {"seconds": time.perf_counter() - begun})


# ---------------------------------------------------------------- a program


def run(text: str, ranks: int, clock: str) -> dict[str, Any]:
    """Execute a text; if it defines `program(comm)`, record that on so many ranks."""
    if not 1 <= ranks <= MOST_RANKS:
        raise Refused(
            f"{ranks} ranks: the player tells the contributions of 1 to {MOST_RANKS} apart; for "
            "more, call minidist.run(program, ranks=64) in the text"
        )
    file = written("program.py", text)
    space: dict[str, Any] = {"__name__": "__main__", "__file__": file}
    results: list[object] = [None] * ranks
    try:
        exec(compile(text, file, "exec"), space)
        program = space.get("program")
        if not callable(program):
            said = "It defines no function program(comm), so there is no run to step through."
            return {"said": said}

        def kept(comm: Communicator) -> None:
            results[comm.rank] = program(comm)

        recording = record(kept, ranks, CLOCKS[clock]())
    except BaseException as error:
        return {"failed": in_words(error, file)}
    returned = [
        f"rank {rank} returned {result!r}"
        for rank, result in enumerate(results)
        if result is not None
    ]
    return {"player": player(recording), "said": "\n".join(returned)}


def in_words(error: BaseException, file: str) -> str:
    """Return what went wrong, at which lines of the reader's own file."""
    lines = [
        f"{Path(file).name}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == file
    ]
    if isinstance(error, SyntaxError):
        lines.append(f"{Path(file).name}:{error.lineno}: {(error.text or '').strip()}")
    lines.append(
        f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    )
    lines += getattr(error, "__notes__", [])
    name = str(getattr(error, "name", "") or "").partition(".")[0]
    if isinstance(error, ImportError) and name in ABSENT:
        lines.append(f"{ABSENT[name]}: run this on your own machine")
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        lines.append(
            "a browser's Python has one thread: use comm.stream() for work beside a rank's"
        )
    return "\n".join(lines)


def written(name: str, text: str) -> str:
    """Write a file of the reader's, where tracebacks and the player find its lines."""
    path = DESK / name
    path.write_text(text, encoding="utf-8")
    linecache.checkcache(str(path))
    return str(path)


# ---------------------------------------------------------------- a lesson


def grade(lesson: str, text: str, task: int) -> dict[str, Any]:
    """Grade an exercise by the visible checks; task 0: all tasks."""
    found, answer = find_lesson(LESSONS, lesson), Answer(Path(written("exercise.py", text)))
    tests = grade_here(found, answer, only=lambda check: task in (0, check.task.number))
    score, most = report.totals(tests)
    rest = [check for check in found.checks if not visible(check)]
    more = sum(check.points for check in rest)
    whole = sum(check.points for check in found.checks)
    return {
        "score": score,
        "most": most,
        "tests": [
            {
                "number": test.number,
                "points": f"{test.score:.1f} of {test.max_score:.1f}",
                "status": test.status,
                "what": f"{test.check.task.title}: {test.check.title} ({test.label})",
                "output": test.output if test.status == "failed" else "",
            }
            for test in tests
        ],
        "said": f"{more:g} of the lesson's {whole:g} points are for checks that are hidden, or that "
        f"run under mpirun: python -m minidist grade {lesson} gives those.",
    }


# ---------------------------------------------------------------- a schedule


def write_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> dict[str, Any]:
    """Return the text of a schedule that has a name."""
    try:
        return {"text": plan(name, ranks, microbatches, chunks).text()}
    except ValueError as error:
        raise Refused(str(error)) from None


def schedule(text: str, backward: float) -> dict[str, Any]:
    """Check a schedule, and put it on a clock on which a forward takes 1."""
    own = read_plan(text, "your schedule")
    if sum(map(len, own.actions)) > MOST_CELLS:
        raise Refused(f"a page draws at most {MOST_CELLS:,} actions")
    check(own)
    half = backward / 2
    timeline = simulate(own, backward=backward, input=half, weight=half)
    held, deferred = peak_activations(own), peak_deferred(own)
    return {
        "svg": draw_svg(timeline),
        "drawn": draw_text(timeline),
        "bubble": f"{timeline.bubble:.1%}",
        "rows": [
            [f"rank {rank}", f"{timeline.idle[rank]:g}", str(held[rank]), str(deferred[rank])]
            for rank in range(own.ranks)
        ],
        "said": f"Every stage does every microbatch once, in an order that can be carried out. The "
        f"step takes {timeline.length:g} forwards.",
    }


# ---------------------------------------------------------------- the planner


def plan_run(
    model: str, cluster: str, tokens: str, batch: str, sequence: str, budget: str
) -> dict[str, Any]:
    """Return the layouts for a run, and what its budget pays for."""
    words = ["--model", model, "--cluster", cluster, "--tokens", tokens]
    words += ["--batch", batch, "--sequence", sequence]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            asked = parser().parse_args(words)
    except SystemExit:
        raise Refused(said.getvalue().strip().splitlines()[-1]) from None
    try:
        money = read_number(budget, float) if budget else 0.0
        if money < 0:
            raise ValueError("is below 0")
    except ValueError as error:
        raise Refused(f"a budget of {budget!r} $ {error}: write a number, or nothing") from None
    found = planned(asked)
    offers, _, bill, _ = found
    rows = []
    for number, offer in enumerate(offers, start=1):
        cost = bill.of(offer.found)
        held = sum(offer.found.bytes.values()) / 1e9
        rows.append(
            [
                str(number),
                bills.name_of(offer.found.run),
                f"{offer.found.seconds:.2f}{GAP}s",
                f"{bills.mfu(offer.found):.1%}",
                f"{cost['days']:,.1f}",
                f"{cost['money']:,.0f}{GAP}$",
                f"{held:.1f}{GAP}GB",
            ]
        )
    needed = bill.of(offers[0].found)["money"]
    return {"rows": rows, "text": bills.text(*found), "said": in_budget(needed, money, tokens)}


def in_budget(needed: float, money: float, tokens: str) -> str:
    """Say whether the money is enough for the best layout, and else for how many tokens."""
    if not money:
        return f"The first layout takes {needed:,.0f} $."
    if needed <= money:
        return f"The first layout takes {needed:,.0f} $ of your {money:,.0f} $."
    pays = amount(tokens) * money / needed
    return (
        f"The first layout takes {needed:,.0f} $, {needed / money:.1f} times your {money:,.0f} $, "
        f"which pay for about {pays / 1e9:,.0f} billion of the tokens."
    )


DO: dict[str, Callable[..., dict[str, Any]]] = {
    "run": run,
    "grade": grade,
    "write_schedule": write_schedule,
    "schedule": schedule,
    "plan": plan_run,
}
