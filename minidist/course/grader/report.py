"""What a grade looks like: a table to read, json and junit for programs, Gradescope's results.json.

https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format
"""

import json
from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree

from minidist.course.grader.grading import FAILED, NOT_STARTED, PASSED, Graded


def totals(tests: Sequence[Graded]) -> tuple[float, float]:
    """Return the points, and how many there could be."""
    return round(sum(test.score for test in tests), 6), round(
        sum(test.max_score for test in tests), 6
    )


def table(tests: Sequence[Graded]) -> str:
    """Return a table: one line a case, what went wrong below it."""
    lines: list[str] = []
    said = ""
    for test in tests:
        if test.lesson not in lines:
            lines.append(test.lesson)
        name = (
            f"{test.check.task.title}: {test.check.title} "
            f"({test.label}{', hidden' * test.check.hidden})"
        )
        lines.append(
            f"  {test.number:<5}{test.score:5.1f} of {test.max_score:4.1f}  {test.status:<12} "
            f"{name}"
        )
        if test.status == FAILED:
            lines += [
                f"       {line}"
                for line in (test.output if test.output != said else "as above").splitlines()
            ]
            said = test.output
    score, most = totals(tests)
    return "\n".join([*lines, f"{score:g} of {most:g} points"])


def as_json(tests: Sequence[Graded]) -> str:
    """Return one object with `score`, `max_score` and `tests`, which have Gradescope's fields."""
    score, most = totals(tests)
    return json.dumps(
        {"score": score, "max_score": most, "tests": [_fields(test) for test in tests]}, indent=2
    )


def gradescope(tests: Sequence[Graded], output: str = "") -> str:
    """Return the text of Gradescope's results.json; `output` says why, if nothing could be
    graded.
    """
    score, _ = totals(tests)
    whole = {"score": score, "output": output, "tests": [_fields(test) for test in tests]}
    return json.dumps(whole | ({"leaderboard": leaderboard(tests)} if tests else {}), indent=2)


def leaderboard(tests: Sequence[Graded]) -> list[dict[str, object]]:
    """Return the points and, of a full score, its figures: none of them depends on the clock or on
    the machine.

    Messages and bytes are added up over all cases; of what else judges measure (peak bytes, bubble)
    the worst counts.
    """
    score, most = totals(tests)
    rows: dict[str, float] = {}
    if score == most:
        for test in tests:
            for name, value in test.figures.items():
                before = rows.get(name, 0.0)
                rows[name] = (
                    before + value
                    if name in ("messages sent", "bytes sent")
                    else max(before, value)
                )
    ranked = [
        {"name": name, "value": round(value, 6), "order": "asc"} for name, value in rows.items()
    ]
    return [{"name": "points", "value": score, "order": "desc"}, *ranked]


def junit(tests: Sequence[Graded]) -> str:
    """Return JUnit's XML: a suite a lesson; what is not started counts as skipped."""
    root = ElementTree.Element("testsuites")
    for lesson in dict.fromkeys(test.lesson for test in tests):
        own = [test for test in tests if test.lesson == lesson]
        number = Counter(test.status for test in own)
        counts = {"tests": len(own), "failures": number[FAILED], "skipped": number[NOT_STARTED]}
        suite = ElementTree.SubElement(
            root, "testsuite", {"name": lesson} | {k: str(n) for k, n in counts.items()}
        )
        for test in own:
            case = ElementTree.SubElement(
                suite, "testcase", classname=lesson, name=f"{test.number} {test.name}"
            )
            if test.status != PASSED:
                kind = "skipped" if test.status == NOT_STARTED else "failure"
                ElementTree.SubElement(case, kind, message=test.output)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _fields(test: Graded) -> dict[str, object]:
    return {
        "name": test.name,
        "number": test.number,
        "score": round(test.score, 6),
        "max_score": round(test.max_score, 6),
        "status": PASSED if test.status == PASSED else FAILED,
        "output": test.output,
        "visibility": "hidden" if test.check.hidden else "visible",
    }
