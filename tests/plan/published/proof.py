"""The proof of the planner on published rows: how its constants were fitted, and how far off it is.

    python tests/plan/published/proof.py fit rows.json ...        the constants that fit the rows best
    python tests/plan/published/proof.py ranges rows.json ...     writes minidist/plan/trust/errors.json (minutes)
    python tests/plan/published/proof.py explain ID rows.json     what would explain the difference of one row

A fit makes the sum of |ln(predicted / measured)| small, by a damped Gauss-Newton method that is
reweighted so that squares stand for absolute values. Within a source a row weighs less, the more rows
the source has: all of them together as the root of their number. `resident` follows from the rows on
memory alone: it is the median of the bytes beside tensors. The command prints the values; a person
writes them into `constants.toml`.

For the ranges each row is predicted with constants that were fitted on the *other* half of the rows,
so that its error is that of a row never seen. Rows of one source are shuffled and dealt out to both
halves in turn. Each fit starts in the middle of every constant's range, so that nothing is left in it
of what the other half said.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, log, sqrt
from statistics import StatisticsError, fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidist.plan.device import Constants, table
from minidist.plan.memory import GB, bytes_held, metered
from minidist.plan.published.check import (
    Compared,
    compare,
    name_of,
    predicted_seconds,
    ranking,
    read,
    was_timed,
)
from minidist.plan.published.fields import LeftOut, PublishedRow, positive
from minidist.plan.published.rows import seconds, setup
from minidist.plan.step import step
from minidist.plan.trust.kinds import FILE, LEAST, Range, kind_of

Vector = NDArray[np.float64]
Pairs = list[tuple[PublishedRow, Compared]]

WEIGHTS = {
    entry["name"]: entry.get("weight", 1.0)
    for entry in table("sources")["source"]
    if "bound" in entry or "weight" in entry
}
SMALL = 0.02  # an error below it counts as a square does
ROUNDS = 40  # of a fit, and of halving a range
OUTSIDE = 0.1  # of the rows' weight lies below a range, and as much above
CHOSEN = 1.05  # what the layout predicted best may take, as a multiple of the best
OF_DEVICE = ("reached", "reached8", "reached4", "bandwidth", "link", "flash")
"""Numbers of a device that are measured."""
WIDE = 3.0  # how many times more or less of them is looked at


# ---------------------------------------------------------------- fits


def fitted_names() -> list[str]:
    """Return the constants that are fitted on times."""
    entries = table("constants").items()
    return [name for name, entry in entries if entry.get("fitted") and name != "resident"]


def errors(rows: Sequence[PublishedRow], known: Constants) -> Vector:
    """Return ln(predicted / measured) of each row."""
    found = []
    for row in rows:
        run = setup(row, known)
        found.append(log(predicted_seconds(row, run, exact=False) / seconds(row, run)))
    return np.array(found)


def usable(rows: Sequence[PublishedRow], known: Constants) -> list[PublishedRow]:
    """Return the rows that have a time and whose source has a weight."""
    found = []
    for row in rows:
        try:
            run = setup(row, known)
            if name_of(row) in WEIGHTS and was_timed(row):
                seconds(row, run)
                found.append(row)
        except LeftOut:
            continue
    return found


def fit(rows: Sequence[PublishedRow], known: Constants) -> Constants:
    """Return the constants that fit the rows best, starting from `known` and inside their ranges."""
    rows = usable(rows, known)
    names, entries = fitted_names(), table("constants")
    low = np.array([log(entries[name]["range"][0]) for name in names])
    high = np.array([log(entries[name]["range"][1]) for name in names])
    counts = Counter(map(name_of, rows))
    weight = np.array([WEIGHTS[name_of(row)] / counts[name_of(row)] ** 0.5 for row in rows])

    def at(x: Vector) -> Vector:
        return errors(rows, changed(x))

    def changed(x: Vector) -> Constants:
        return known.but(**{name: exp(value) for name, value in zip(names, x, strict=True)})

    x = np.array([log(known[name]) for name in names])
    error = at(x)
    damping = 1e-2
    for _ in range(ROUNDS):
        slope = np.stack([(at(x + 1e-3 * unit) - error) / 1e-3 for unit in np.eye(len(x))], axis=1)
        each = weight / np.maximum(np.abs(error), SMALL)
        curvature, pull = slope.T @ (each[:, None] * slope), -slope.T @ (each * error)
        while damping < 1e3:
            change = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature) + 1e-9), pull)
            moved = np.clip(x + np.clip(change, -0.3, 0.3), low, high)
            new = at(moved)
            if np.sum(weight * np.abs(new)) < np.sum(weight * np.abs(error)) - 1e-6:
                x, error, damping = moved, new, max(damping / 4, 1e-4)
                break
            damping *= 5
        else:
            break
    best = changed(x)
    return best.but(resident=resident(rows, best))


def resident(rows: Sequence[PublishedRow], known: Constants) -> float:
    """Return the median of the GB that drivers reported beside the tensors predicted; what is known of
    it if no row says any.
    """
    beside = []
    for row in rows:
        try:
            run = setup(row, known.but(resident=0.0))
            measured = positive(row["measured"], "memory_gb")
        except LeftOut:
            continue
        if measured and run.software.measured == "driver":
            beside.append(measured - sum(bytes_held(run).values()) / GB)
    try:
        return float(median(beside))
    except StatisticsError:
        return known["resident"]


# ---------------------------------------------------------------- rows never seen


def halves(rows: Sequence[PublishedRow], seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Return the rows in two parts, each with half of every source."""
    sources: dict[str, list[PublishedRow]] = defaultdict(list)
    for row in rows:
        sources[name_of(row)].append(row)
    generator = random.Random(seed)
    dealt: list[PublishedRow] = []
    for _, several in sorted(sources.items()):
        dealt += generator.sample(several, len(several))
    return dealt[::2], dealt[1::2]


def unfitted() -> Constants:
    """Return the constants before any row was looked at: fitted ones in the middle of their ranges."""
    middle = {}
    for name, entry in table("constants").items():
        if entry.get("fitted"):
            low, high = entry["range"]
            middle[name] = sqrt(low * high)
    return Constants.table().but(**middle)


def unseen(rows: Sequence[PublishedRow]) -> Pairs:
    """Return each value, predicted by constants that were fitted on the other half of the rows."""
    one, other = halves(rows)
    return compared(one, fit(other, unfitted())) + compared(other, fit(one, unfitted()))


def compared(rows: Sequence[PublishedRow], known: Constants) -> Pairs:
    """Return each value of the rows that can be predicted."""
    found: Pairs = []
    for row in rows:
        try:
            found += [(row, each) for each in compare(row, known)]
        except LeftOut:
            continue
    return found


# ---------------------------------------------------------------- ranges


def ranges(pairs: Pairs, constants: str) -> dict[str, Any]:
    """Return the table of errors by kind, and how well layouts of one model are ranked."""
    known = Constants.table()
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
    models = [each["chosen"] for each in ranking(pairs)]
    ranked = {
        "models": len(models),
        "chosen well": sum(chosen <= CHOSEN for chosen in models),
        "mean": round(fmean(models), 3) if models else 0.0,
    }
    return {
        "written by": "python tests/plan/published/proof.py ranges, from files of published rows",
        "constants": constants,
        "rows": len({id(row) for row, _ in pairs}),
        "ranking": ranked,
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


# ---------------------------------------------------------------- one row explained


def explain(row: PublishedRow, known: Constants) -> dict[str, Any]:
    """Return by quantity the terms of a prediction, with the factor by which each alone would explain
    what was measured, and the constants, with the value that would; None for what cannot alone.
    """
    found = {}
    run = setup(row, known)
    for each in compare(row, known):
        if "single layer" in str(row["config"].get("scope")):
            terms = {"layer": each.predicted}
        elif each.quantity == "time":
            terms = step(run, exact=True)
        else:
            held = metered(run, "reserved" if each.quantity == "memory reserved" else "")
            terms = {kind: bytes / GB for kind, bytes in held.items()}
        missing = each.measured - sum(terms.values())
        factors = {
            name: (value, 1 + missing / value if value + missing > 0 else None)
            for name, value in terms.items()
            if value
        }
        found[each.quantity] = {"predicted": each.predicted, "measured": each.measured}
        found[each.quantity] |= {"terms": factors}
        if each.quantity == "time":
            found["time"]["constants"] = levers(row, each, known)
    return found


def levers(row: PublishedRow, compared: Compared, known: Constants) -> dict[str, float | None]:
    """Return the value of each constant, and of each number of the device, that would explain a row's
    seconds.
    """
    run = setup(row, known)
    device = run.machine.device
    # The closed form is a little off the clock, so the same share of it has to be explained.
    target = compared.measured / compared.predicted * predicted_seconds(row, run, exact=False)

    def with_constant(name: str) -> Callable[[float], float]:
        return lambda value: predicted_seconds(
            row, setup(row, known.but(**{name: value})), exact=False
        )

    def with_device(name: str) -> Callable[[float], float]:
        def seconds(value: float) -> float:
            changed: dict[str, Any] = {name: value}
            there = replace(run.machine, device=replace(device, **changed))
            return predicted_seconds(row, replace(run, machine=there), exact=False)

        return seconds

    found = {}
    for name, entry in table("constants").items():
        found[name] = solved(with_constant(name), *entry["range"], target)
    for name in OF_DEVICE:
        if value := getattr(device, name):
            most = min(1.0, WIDE * value) if value <= 1 else WIDE * value
            found[f"{device.name}: {name}"] = solved(with_device(name), value / WIDE, most, target)
    return found


def solved(
    seconds: Callable[[float], float], low: float, high: float, target: float
) -> float | None:
    """Return the value inside a range at which seconds, which grow or fall with it, are `target`."""
    ends = seconds(low), seconds(high)
    if not min(ends) <= target <= max(ends) or ends[0] == ends[1]:
        return None
    grows = ends[1] > ends[0]
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if (seconds(middle) < target) == grows:
            low = middle
        else:
            high = middle
    return low


def main(argv: Sequence[str]) -> None:
    """Fit constants, write the ranges, or explain a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("do", choices=("fit", "ranges", "explain"))
    parser.add_argument("words", nargs="+", help="files of published rows, before them an id")
    asked = parser.parse_args(argv)
    files = asked.words[asked.do == "explain" :]
    rows = [row for file in files for row in read(file)]
    known = Constants.table()
    if asked.do == "fit":
        best = fit(rows, known)
        for name in [*fitted_names(), "resident"]:
            print(f"{name:<16}{known[name]:>10.4g} -> {best[name]:.4g}")
    elif asked.do == "ranges":
        found = ranges(unseen(rows), "fitted on the other half of the rows")
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    else:
        (row,) = [row for row in rows if row.get("id") == asked.words[0]]
        print(json.dumps(explain(row, known), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
