"""`plan --as-published`: a table of named runs, as published, as planned, and as they would be run
today.

The facts and the planning are in `minidist/plan/trust/`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from minidist.cli.plan.answer import name_of
from minidist.draw.table import aligned
from minidist.full.launch.parser import Parser
from minidist.plan.device import Constants, PlanError
from minidist.plan.memory import GB
from minidist.plan.trust.runs import as_told, machine_of, named_runs, today

HEADER = ("run", "GPUs", "published", "as published", "of it", "today's best", "of it")


def planned(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hours of a named run, or why no plan is made for it."""
    found: dict[str, Any] = {"says": said["says"]}
    try:
        old = as_told(said)
        found |= {
            "published": round(old.published),
            "planned": round(old.planned),
            "layout": name_of(old.found.run),
            "holds": round(sum(old.found.bytes.values()) / GB, 1),
        }
        new = today(said)
    except PlanError as reason:
        return found | {"refused": str(reason)}
    run = new.found.run
    return found | {"today": round(new.planned), "layout today": name_of(run)}


def rows_of(tree: Mapping[str, Mapping[str, Any]]) -> list[Sequence[str]]:
    """Return the rows of the table: hours, and planned ones as shares of published ones."""
    rows: list[Sequence[str]] = []
    for name, each in tree.items():
        cells = [each["says"], gpus_of(name)]
        cells.append(f"{each['published']:,} h" if "published" in each else "")
        for of in ("planned", "today"):
            if of in each:
                cells += [f"{each[of]:,} h", f"{each[of] / each['published']:.2f}"]
            else:
                cells += ["not planned", ""]
        rows.append(cells)
    return rows


def gpus_of(name: str) -> str:
    """Return the GPUs of a run in words."""
    where = machine_of(named_runs()[name])
    return f"{where.gpus:,} {where.name}"


def holding(name: str, held: float) -> str:
    """Say what a GPU is predicted to hold, and whether that is more than it has.

    The run was trained: so where it is more, the prediction is wrong. What a driver sees beside tensors
    is a median of other runs.
    """
    room = machine_of(named_runs()[name]).device.memory / GB
    beside = Constants.table()["resident"]
    too_much = ""
    if held > room:
        too_much = ", which is too much: it was trained, so it held less"
    if room < held <= room + beside:
        too_much += f"; {beside:.1f} of them are what other runs had beside their tensors"
    return f"{held:,.1f} of {room:,.0f} GB a GPU{too_much}"


def text(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table, and what has to be known of each run."""
    parts = [aligned(HEADER, rows_of(tree), left=2)]
    notes = []
    for name, each in tree.items():
        said = named_runs()[name]
        words = [f"{each['says']}: {each.get('layout', 'no layout')}; {said['software']}"]
        if "holds" in each:
            words.append(holding(name, each["holds"]))
        if "refused" in each:
            words.append(f"not planned: {each['refused']}")
        notes.append("; ".join(words))
        notes.append(f"  unsaid: {said['unsaid']}")
        notes.append(f"  {said['source']}")
    return "\n\n".join([*parts, "\n".join(notes)])


def main(argv: Sequence[str]) -> int:
    """Predict named runs as they were published; each of their searches takes some seconds."""
    found = Parser("python -m minidist plan --as-published", description=main.__doc__)
    found.add_argument("--only", choices=named_runs(), help="one of the runs")
    found.add_argument("--format", choices=("text", "json"), default="text")
    asked = found.parse_args(argv)
    tree = {}
    for name, said in named_runs().items():
        if asked.only in (None, name):
            print(f"{said['says']} ...", file=sys.stderr)
            tree[name] = planned(said)
    print(json.dumps(tree, indent=1) if asked.format == "json" else text(tree))
    return 0
