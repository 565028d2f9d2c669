"""How the fitted constants of `constants.toml` were chosen: from the rows given, and from nothing
else.

    python -m minidist.plan.published.fit rows.json rows_2026.json

Each source weighs the same, however many rows it has. A damped Gauss-Newton method makes the sum of
|ln(predicted / measured)| small; it is reweighted so that squares stand for absolute values.
`resident` follows from the rows on memory alone: it is the median of the bytes beside tensors. The
command prints the values; a person writes them into the table.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from math import exp, log
from statistics import median

import numpy as np
from numpy.typing import NDArray

from minidist.plan.device import Constants, table
from minidist.plan.memory import GB, bytes_held
from minidist.plan.published.check import SOURCES, name_of, predicted_seconds, read
from minidist.plan.published.fields import LeftOut, PublishedRow
from minidist.plan.published.rows import positive, seconds, setup

Vector = NDArray[np.float64]
WEIGHTS = {
    entry["name"]: entry.get("weight", 1.0)
    for entry in SOURCES
    if "bound" in entry or "weight" in entry
}
SMALL = 0.02  # an error below it counts as a square does
ROUNDS = 40


def fitted_names() -> list[str]:
    """Return the constants that are fitted on times."""
    return [
        name
        for name, entry in table("constants").items()
        if entry.get("fitted") and name != "resident"
    ]


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
            if (
                name_of(row) in WEIGHTS
                and row.get("kind") == "throughput"
                and not row["measured"].get("oom")
            ):
                seconds(row, run)
                found.append(row)
        except LeftOut:
            continue
    return found


def fit(rows: Sequence[PublishedRow], known: Constants) -> Constants:
    """Return the constants that fit the rows best, starting from `known` and inside their
    ranges.
    """
    rows = usable(rows, known)
    names, entries = fitted_names(), table("constants")
    low = np.array([log(entries[name]["range"][0]) for name in names])
    high = np.array([log(entries[name]["range"][1]) for name in names])
    counts = Counter(map(name_of, rows))
    weight = np.array([WEIGHTS[name_of(row)] / counts[name_of(row)] ** 0.5 for row in rows])

    def at(x: Vector) -> Vector:
        return errors(
            rows, known.but(**{name: exp(value) for name, value in zip(names, x, strict=True)})
        )

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
    return known.but(**{name: exp(value) for name, value in zip(names, x, strict=True)})


def resident(rows: Sequence[PublishedRow], known: Constants) -> float:
    """Return the median of the GB that drivers reported beside the tensors predicted."""
    beside = []
    for row in rows:
        try:
            run = setup(row, known.but(resident=0.0))
            measured = positive(row["measured"], "memory_gb")
        except LeftOut:
            continue
        if measured and run.software.measured == "driver":
            beside.append(measured - sum(bytes_held(run).values()) / GB)
    return float(median(beside))


def main(argv: Sequence[str]) -> int:
    """Print each fitted constant: as it is in the table, and as these rows have it."""
    known = Constants.table()
    rows = []
    for path in argv:
        rows += read(path)
    best = fit(rows, known)
    best = best.but(resident=resident(rows, best))
    for name in [*fitted_names(), "resident"]:
        print(f"{name:<16}{known[name]:>10.4g} -> {best[name]:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
