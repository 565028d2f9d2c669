"""`plan check`: the report of `check.py` as tables, by source and by group, and what else it says of
how far the planner can be trusted.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from minidist.draw.table import aligned
from minidist.full.launch.parser import Parser
from minidist.plan.device import Constants
from minidist.plan.published.check import (
    SOURCES,
    check,
    group_of,
    measures,
    read,
    source_of,
)
from minidist.plan.published.halves import Halves, both_ways

CHOSEN = 1.05  # what the layout predicted best may take, beside the best
NAMED = 8  # models that are named where it takes longer
HEADER = ("rows", "mean |error|", "median", "bias", "bound", "peer", "we beside it", "permuted")


def text(report: Mapping[str, Any]) -> str:
    """Return the report as tables and sentences."""
    bounds = {entry["name"]: entry.get("bound") for entry in SOURCES}
    bounds |= {"memory": 5, "formula": 0}
    parts = [table_of("source", report["sources"], bounds)]
    if report["groups"]:
        parts.append(table_of("group", report["groups"], {}))
    parts.append("\n".join(ranked(report["ranking"])))
    parts.append("\n".join(without_room(report["room"])))
    predicted = len({each["id"] for each in report["rows"]})
    lines = [f"{predicted} rows are predicted, {len(report['left_out'])} are left out"]
    if report["inferred"]:
        lines.append(
            f"memory of {len(report['inferred'])} rows is not compared: what it is in proportion to, "
            "the microbatch or what is computed again, was not published"
        )
    reasons = Counter((each["source"], each["why"]) for each in report["left_out"])
    lines += [
        f"left out: {count} of {source}: {why}" for (source, why), count in sorted(reasons.items())
    ]
    return "\n\n".join(part for part in (*parts, "\n".join(lines)) if part)


def table_of(
    head: str, lines: Mapping[str, Mapping[str, float]], bounds: Mapping[str, float | None]
) -> str:
    """Return errors by line; a column that says nothing is left out."""
    rows = []
    for name, each in lines.items():
        peer = [f"{each[key]:.2f} %" for key in ("peer", "beside_peer") if key in each]
        rows.append(
            [
                name,
                f"{each['n']:.0f}",
                f"{each['mean']:.2f} %",
                f"{each['median']:.2f} %",
                f"{each['bias']:.1f} %",
                f"{bounds.get(name) or ''}",
                *(peer or ("", "")),
                f"{each['permuted']:,.0f} %",
            ]
        )
    header = (head, *HEADER)
    said = [column for column in range(len(header)) if any(row[column] for row in rows)]
    kept = [[row[column] for column in said] for row in rows]
    return aligned([header[column] for column in said], kept)


def ranked(ranking: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how good the layouts are that are predicted best, by source, and where they are not."""
    lines = []
    for name in sorted({each["source"] for each in ranking}):
        models = [each for each in ranking if each["source"] == name]
        took = [each["chosen"] for each in models]
        early = sum(each["place"] <= 5 for each in models)
        lines.append(
            f"{name}: of {len(took)} models with several layouts, the one predicted best took "
            f"{fmean(took):.3f} of the best (at most {max(took):.3f}); the best is among the "
            f"first five of {early}"
        )
    if not ranking:
        return []
    failed = sorted(
        (each for each in ranking if each["chosen"] > CHOSEN), key=lambda each: -each["chosen"]
    )
    good = len(ranking) - len(failed)
    lines.append(
        f"in {good / len(ranking):.1%} of all {len(ranking)} models with several layouts the one "
        f"predicted best took at most {CHOSEN} of the best"
    )
    for each in failed[:NAMED]:
        lines.append(
            f"  not {each['source']}, {each['layers']} layers of {each['hidden']}: "
            f"{each['chosen_id']} took {each['chosen']:.3f} of {each['best_id']}, which is "
            f"predicted to be number {each['place']} of {each['layouts']}"
        )
    if len(failed) > NAMED:
        lines.append(f"  nor {len(failed) - NAMED} others: --format json names them")
    return lines


def without_room(room: Mapping[str, Any]) -> list[str]:
    """Say how many runs that ran would not fit, what would explain it, and which need most beside what
    they have.
    """
    refused = sorted(room["refused"], key=lambda each: each["has"] / each["needs"])
    lines = [f"of {room['ran']} runs that ran {len(refused)} are predicted not to fit"]
    reasons = Counter(each["why"] for each in refused)
    lines += [f"  {count}: {why}" for why, count in reasons.most_common()]
    for each in refused[:NAMED]:
        needed = f"{each['needs']:.0f} of {each['has']:.0f} GB"
        lines.append(f"  {each['id']} needs {needed}: {each['why']}")
    if len(refused) > NAMED:
        lines.append(f"  and {len(refused) - NAMED} others: --format json names them")
    return lines


def halves_text(both: Halves) -> str:
    """Return how far off rows are that a fit has seen, and rows that it has not."""
    parts = []
    for head, name in (("source", source_of), ("group", group_of)):
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for side, pairs in enumerate(both):
            for _, each in pairs:
                if name(each):
                    lines.setdefault(name(each), ([], []))[side].append(each.error)
        rows = []
        for line, (own, other) in sorted(lines.items()):
            on_own, on_other = measures(own), measures(other)
            rows.append(
                (
                    line,
                    str(len(other)),
                    f"{on_own['mean']:.2f} %",
                    f"{on_other['mean']:.2f} %",
                    f"{on_other['median']:.2f} %",
                    f"{on_other['bias']:.1f} %",
                )
            )
        header = (head, "rows", "fitted on them", "on the other half", "median", "bias")
        parts += [aligned(header, rows)] if rows else []
    return "\n\n".join(parts)


def main(argv: Sequence[str]) -> int:
    """Print predictions beside published measurements, or with --permuted beside those of other
    rows.
    """
    found = Parser("python -m minidist plan check", description=main.__doc__)
    found.add_argument("--rows", required=True, nargs="+", help="files of published rows, in JSON")
    found.add_argument(
        "--permuted", type=int, metavar="SEED", help="let measured values change places"
    )
    found.add_argument(
        "--halves",
        action="store_true",
        help="fit the constants on half of the rows and check the other half, both ways (minutes)",
    )
    found.add_argument("--format", choices=("text", "json"), default="text")
    asked = found.parse_args(argv)
    rows = [row for file in asked.rows for row in read(file)]
    if asked.halves:
        both = both_ways(rows, asked.permuted or 0)
        if asked.format == "json":
            named = {}
            for side, values in both._asdict().items():
                named[side] = [each._asdict() for each in values]
            print(json.dumps(named, indent=1))
        else:
            print(halves_text(both))
        return 0
    report = check(rows, Constants.table(), asked.permuted)
    print(json.dumps(report, indent=1) if asked.format == "json" else text(report))
    return 0
