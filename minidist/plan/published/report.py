"""`plan check`: the report of `check.py` as tables, by source and by group; JSON has all of it."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from minidist.draw.table import aligned
from minidist.full.launch.parser import Parser
from minidist.plan.device import Constants
from minidist.plan.published.check import check, read

COLUMNS = {
    "mean": "mean |error|",
    "median": "median",
    "bias": "bias",
    "peer": "peer",
    "beside_peer": "ours on its rows",
    "permuted": "permuted",
}


def text(report: Mapping[str, Any]) -> str:
    """Return the report as tables and sentences."""
    predicted = len({each["id"] for each in report["rows"]})
    refused = report["room"]["refused"]
    lines = [f"{predicted} rows are predicted, {len(report['left_out'])} are left out"]
    reasons = Counter((each["source"], each["why"]) for each in report["left_out"])
    for (source, why), count in sorted(reasons.items()):
        lines.append(f"  {count} of {source}: {why}")
    lines.append(
        f"of {report['room']['ran']} runs that ran {len(refused)} are predicted not to fit"
    )
    for why, count in Counter(each["why"] for each in refused).most_common():
        lines.append(f"  {count}: {why}")
    tables = [table_of(name, report[f"{name}s"]) for name in ("source", "group")]
    return "\n\n".join([*filter(None, tables), "\n".join(lines)])


def table_of(head: str, lines: Mapping[str, Mapping[str, float]]) -> str:
    """Return errors by line in percent; nothing if there are no lines."""
    rows = []
    for name, each in lines.items():
        cells = [f"{each[key]:,.2f} %" if key in each else "" for key in COLUMNS]
        rows.append([name, str(each["n"]), *cells])
    return aligned((head, "rows", *COLUMNS.values()), rows) if rows else ""


def main(argv: Sequence[str]) -> int:
    """Print predictions and published measurements, or with --permuted those of other rows."""
    found = Parser("python -m minidist plan check", description=main.__doc__)
    found.add_argument("--rows", required=True, nargs="+", help="files of published rows, in JSON")
    found.add_argument(
        "--permuted", type=int, metavar="SEED", help="let measured values change places"
    )
    found.add_argument("--format", choices=("text", "json"), default="text")
    asked = found.parse_args(argv)
    rows = [row for file in asked.rows for row in read(file)]
    report = check(rows, Constants.table(), asked.permuted)
    print(json.dumps(report, indent=1) if asked.format == "json" else text(report))
    return 0
