"""Writes what is known of the planner's errors, from files of published rows:

    python -m minidist.plan.trust.measure rows.json rows_2026.json [--as-fitted]     errors.json
    python docs/tables.py                                                            and what docs/ says of it

Each row is predicted with constants that were fitted on the *other* half of the rows (`halves.py`;
some minutes), so that its error is that of a row never seen. `--as-fitted` uses the constants of the
table, which have seen them: quick, and a little too good.

Within a kind a source weighs as the root of its rows, as it does in the fit: seven hundred small runs of
one paper say less of a new run than as many of ten papers.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from minidist.full.launch.parser import Parser
from minidist.plan.device import Constants, PlanError
from minidist.plan.published.check import Compared, ranking, read
from minidist.plan.published.fields import PublishedRow
from minidist.plan.published.halves import Pairs, both_ways, compared
from minidist.plan.published.report import CHOSEN
from minidist.plan.published.rows import setup
from minidist.plan.trust.kinds import FILE, LEAST, Range, kind_of

OUTSIDE = 0.1  # of the rows' weight lies below a range, and as much above


def measured(rows: Sequence[PublishedRow], as_fitted: bool = False) -> dict[str, Any]:
    """Return the table of errors by kind, and how well layouts of one model are ranked."""
    known = Constants.table()
    pairs = compared(rows, known) if as_fitted else both_ways(rows).unseen
    of_kinds: dict[str, dict[str, list[Compared]]] = defaultdict(lambda: defaultdict(list))
    for row, each in pairs:
        if each.quantity != "formula":
            of_kinds[kind_of(setup(row, known))][each.quantity].append(each)
    kinds = {}
    for kind, quantities in sorted(of_kinds.items()):
        kinds[kind] = {
            quantity: range_of_rows(values)._asdict()
            for quantity, values in sorted(quantities.items())
        }
    return {
        "written by": "python -m minidist.plan.trust.measure, from files of published rows",
        "constants": "of the table, which have seen them"
        if as_fitted
        else "fitted on the other half of the rows",
        "rows": len({id(row) for row, _ in pairs}),
        "ranking": ranked(pairs),
        "kinds": kinds,
    }


def range_of_rows(values: Sequence[Compared]) -> Range:
    """Return the range of some rows of a kind; see `Range`."""
    counts = Counter(each.source for each in values)
    weight = {source: count**-0.5 for source, count in counts.items()}
    taken = sorted((each.measured / each.predicted, weight[each.source]) for each in values)
    low = high = 0.0
    if len(values) >= LEAST:
        low, high = quantile(taken, OUTSIDE), quantile(taken, 1 - OUTSIDE)
    off = [each.error for each in values]
    return Range(
        len(values),
        len(counts),
        round(low, 3),
        round(high, 3),
        round(fmean(map(abs, off)), 1),
        round(fmean(off), 1),
    )


def quantile(values: Sequence[tuple[float, float]], share: float) -> float:
    """Return the first of sorted values below which lies such a share of the weight."""
    total, below = sum(weight for _, weight in values), 0.0
    for value, weight in values:
        below += weight
        if below >= share * total:
            return value
    return values[-1][0]


def ranked(pairs: Pairs) -> dict[str, float]:
    """Return how many models have several layouts, and of how many a good one is chosen."""
    models = [each["chosen"] for each in ranking(pairs)]
    good = sum(chosen <= CHOSEN for chosen in models)
    mean = round(fmean(models), 3) if models else 0.0
    return {"models": len(models), "chosen well": good, "mean": mean}


def main(argv: Sequence[str]) -> int:
    """Write errors.json from files of published rows."""
    found = Parser("python -m minidist.plan.trust.measure", description=main.__doc__)
    found.add_argument("rows", nargs="+", help="files of published rows, in JSON")
    found.add_argument("--as-fitted", action="store_true", help="do not fit anew on halves")
    asked = found.parse_args(argv)
    try:
        rows = [row for file in asked.rows for row in read(file)]
    except PlanError as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    text = json.dumps(measured(rows, asked.as_fitted), indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")
    print(f"written: {FILE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
