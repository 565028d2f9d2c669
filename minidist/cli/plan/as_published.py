"""`plan --as-published`: a table of named runs, as published, as planned, and as they would be run
today.

The facts are in `minidist/plan/runs.toml`, the planning in `minidist/plan/trust/`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from minidist.cli.plan.answer import name_of
from minidist.draw.table import aligned
from minidist.full.launch.parser import Parser
from minidist.plan.device import Constants, table
from minidist.plan.memory import GB
from minidist.plan.trust.runs import as_published, gpu_hours, machine_of, today

HEADER = ("run", "GPUs", "published", "as published", "of it", "today's best", "of it")


def planned(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hours of a named run."""
    then, now = as_published(said), today(said)
    published, hours = gpu_hours(said, then)
    return {
        "says": said["says"],
        "published": round(published),
        "planned": round(hours),
        "layout": name_of(then.run),
        "holds": round(sum(then.bytes.values()) / GB, 1),
        "today": round(gpu_hours(said, now)[1]),
        "layout today": name_of(now.run),
    }


def gpus_of(name: str) -> str:
    """Return the GPUs of a run in words."""
    where = machine_of(table("runs")[name])
    return f"{where.gpus:,} {where.name}"


def holding(name: str, held: float) -> str:
    """Say what a GPU is predicted to hold, and whether that is more than it has.

    The run was trained: so where it is more, the prediction is wrong. What a driver sees beside tensors
    is a median of other runs.
    """
    room = machine_of(table("runs")[name]).device.memory / GB
    beside = Constants.table()["resident"]
    too_much = ""
    if held > room:
        too_much = ", which is too much: it was trained, so it held less"
    if room < held <= room + beside:
        too_much += f"; {beside:.1f} of them are what other runs had beside their tensors"
    return f"{held:,.1f} of {room:,.0f} GB a GPU{too_much}"


def text(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table, hours and their shares of published ones, and what has to be known of each
    run.
    """
    rows, notes = [], []
    for name, each in tree.items():
        said = table("runs")[name]
        row = [each["says"], gpus_of(name), f"{each['published']:,} h"]
        for of in ("planned", "today"):
            row += [f"{each[of]:,} h", f"{each[of] / each['published']:.2f}"]
        rows.append(row)
        held = holding(name, each["holds"])
        notes += [
            f"{each['says']}: {each['layout']}; {said['software']}; {held}",
            f"  unsaid: {said['unsaid']}",
            f"  {said['source']}",
        ]
    return "\n\n".join([aligned(HEADER, rows, left=2), "\n".join(notes)])


def main(argv: Sequence[str]) -> int:
    """Predict named runs as they were published; each of their searches takes some seconds."""
    found = Parser("python -m minidist plan --as-published", description=main.__doc__)
    found.add_argument("--only", choices=table("runs"), help="one of the runs")
    found.add_argument("--format", choices=("text", "json"), default="text")
    asked = found.parse_args(argv)
    tree = {}
    for name, said in table("runs").items():
        if asked.only in (None, name):
            print(f"{said['says']} ...", file=sys.stderr)
            tree[name] = planned(said)
    print(json.dumps(tree, indent=1) if asked.format == "json" else text(tree))
    return 0
