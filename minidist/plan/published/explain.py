"""`plan explain ROW --rows FILE`: where the seconds and bytes of a published row go as predicted, and
what would have to be otherwise to explain what was measured.

    term       a kind of seconds or bytes: by which factor it alone would have to change
    constant   a number of `constants.toml` or of the device: which value would explain it all, if any does

Papers publish sums, so measured values stand beside sums. A term cannot explain by itself what is more
than all of it; a constant only what it reaches inside its range (a number of a device: from a third
to three times of it).
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minidist.draw.table import aligned
from minidist.full.data.files import retold
from minidist.full.launch.parser import Parser, nearest
from minidist.plan.device import Constants, Device, PlanError, table
from minidist.plan.memory import GB, metered
from minidist.plan.parts.layer import passes
from minidist.plan.published.check import Compared, compare, predicted_seconds, read
from minidist.plan.published.fields import LeftOut, PublishedRow
from minidist.plan.published.rows import setup
from minidist.plan.run import Setup
from minidist.plan.step import step

UNITS = {
    "time": "seconds of a step",
    "memory": "GB of a GPU",
    "memory reserved": "GB of a GPU that the allocator has reserved",
}
# numbers of a device that are measured
OF_DEVICE = (
    "reached",
    "reached8",
    "reached4",
    "bandwidth",
    "link",
    "flash",
)
WIDE = 3.0  # how many times more or less of them is looked at
SHOWS = 1e-3  # of a step: what a constant changes less is not told
ROUNDS = 40  # of halving a range


class Term(NamedTuple):
    """A kind of seconds or GB, and the factor that explains the difference; 0 if none does."""

    name: str
    predicted: float
    factor: float


class Lever(NamedTuple):
    """A constant: its value, what it reaches inside its range in seconds, and the value that
    explains what was measured; None if none does.
    """

    name: str
    value: float
    least: float
    most: float
    explains: float | None


class Explained(NamedTuple):
    """A quantity of a row: predicted and measured sums, its terms, and what they depend on."""

    compared: Compared
    terms: Sequence[Term]
    levers: Sequence[Lever]


def explain(row: PublishedRow, known: Constants) -> list[Explained]:
    """Return each quantity of a row that is measured and predicted, with its terms.

    Raises
    ------
    LeftOut
        If the row cannot be predicted.
    """
    found = []
    for each in compare(row, known):
        if each.quantity == "formula":
            raise LeftOut("it is a formula of a paper: nothing was measured")
        run = setup(row, known)
        if each.quantity == "time":
            found.append(
                Explained(each, terms(seconds_of(row, run), each), levers(row, each, known))
            )
        else:
            meter = "reserved" if each.quantity == "memory reserved" else ""
            held = {kind: bytes / GB for kind, bytes in metered(run, meter).items()}
            found.append(Explained(each, terms(held, each), ()))
    return found


def seconds_of(row: PublishedRow, run: Setup) -> Mapping[str, float]:
    """Return the seconds of what the row measured, by kind: of a step, or of one layer."""
    if "single layer" not in str(row["config"].get("scope")):
        return step(run, exact=True)
    kinds: dict[str, float] = defaultdict(float)
    for each in passes(run):
        for name, value in each.kinds.items():
            kinds[name] += value
        kinds["waiting"] += each.seconds - sum(each.kinds.values())
    return kinds


def terms(kinds: Mapping[str, float], compared: Compared) -> list[Term]:
    """Return each kind with the factor by which it alone would explain what was measured."""
    missing = compared.measured - sum(kinds.values())
    found = []
    for name, value in kinds.items():
        factor = (value + missing) / value if value else 0.0
        found.append(Term(name, value, max(0.0, factor)))
    return found


# ---------------------------------------------------------------- what terms depend on


def levers(row: PublishedRow, compared: Compared, known: Constants) -> list[Lever]:
    """Return the constants on which the row's seconds depend, those first that need the least
    change.
    """
    now = predicted_seconds(row, setup(row, known), exact=False)
    # The closed form is a little off the clock: so the same share of it has to be explained.
    target = compared.measured / compared.predicted * now
    found = []
    for name, entry in table("constants").items():
        found.append(
            lever(name, known[name], entry["range"], changed_constant(row, known, name), target)
        )
    device = setup(row, known).machine.device
    for name in OF_DEVICE:
        value = getattr(device, name)
        if not value:
            continue
        most = min(1.0, WIDE * value) if value <= 1 else WIDE * value
        of_device = changed_device(row, known, name)
        found.append(
            lever(f"{device.name}: {name}", value, (value / WIDE, most), of_device, target)
        )
    telling = [each for each in found if each.most - each.least > SHOWS * now]
    return sorted(telling, key=lambda each: (change(each), each.least - each.most))


def lever(
    name: str,
    value: float,
    allowed: Sequence[float],
    seconds: Callable[[float], float],
    target: float,
) -> Lever:
    """Return which value of a constant explains `target`, by halving its range.

    Seconds grow or fall with each constant.
    """
    low, high = allowed
    ends = seconds(low), seconds(high)
    least, most = min(ends), max(ends)
    if not least <= target <= most or least == most:
        return Lever(name, value, least, most, None)
    grows = ends[1] > ends[0]
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if (seconds(middle) < target) == grows:
            low = middle
        else:
            high = middle
    return Lever(name, value, least, most, low)


def change(lever: Lever) -> float:
    """Return how large the change is that a lever needs, as a factor of 1 or more."""
    if not lever.explains or not lever.value:
        return float("inf")
    factor = lever.explains / lever.value
    return max(factor, 1 / factor)


def changed_constant(row: PublishedRow, known: Constants, name: str) -> Callable[[float], float]:
    """Return what gives the seconds of a row for each value of a constant."""

    def seconds(value: float) -> float:
        other = known.but(**{name: value})
        return predicted_seconds(row, setup(row, other), exact=False)

    return seconds


def changed_device(row: PublishedRow, known: Constants, name: str) -> Callable[[float], float]:
    """Return the same for a number of the row's device."""
    run = setup(row, known)
    device: Device = run.machine.device

    def seconds(value: float) -> float:
        changed: dict[str, Any] = {name: value}
        other = replace(device, **changed)
        there = replace(run, machine=replace(run.machine, device=other))
        return predicted_seconds(row, there, exact=False)

    return seconds


# ---------------------------------------------------------------- words


def text(row: PublishedRow, run: Setup, explained: Sequence[Explained]) -> str:
    """Return what the command prints."""
    model, machine = run.model, run.machine
    sizes = [f"{axis}={getattr(run, axis)}" for axis in ("tp", "pp", "dp", "cp", "ep")]
    sizes += [f"zero={run.zero}", f"microbatch={run.microbatch}", f"recompute={run.recompute}"]
    if run.pp > 1:
        sizes.append(f"{run.schedule} x{run.chunks}")
    parts = [
        f"{row['id']}: {row.get('source')}\n"
        f"{model.parameters / 1e9:,.1f}B parameters, {model.layers} layers of {model.hidden}, on "
        f"{machine.gpus:,} GPUs of {machine.name}; {run.batch:,} sequences of {run.sequence:,} tokens "
        f"a step\nread as {' '.join(sizes)}, {run.software.name}"
        f", {run.precision}"
    ]
    for each in explained:
        unit = UNITS.get(each.compared.quantity, each.compared.quantity)
        parts.append(terms_table(unit, each))
        if each.levers:
            parts.append(levers_table(each))
    quantities = {each.compared.quantity for each in explained}
    if "time" not in quantities:
        parts.append(unmeasured_table(UNITS["time"], seconds_of(row, run)))
    if "memory" not in quantities:
        held = {kind: bytes / GB for kind, bytes in metered(run).items()}
        parts.append(unmeasured_table(UNITS["memory"], held))
    return "\n\n".join(parts)


def terms_table(unit: str, explained: Explained) -> str:
    """Return the terms of a quantity, and below them predicted and measured sums."""
    compared = explained.compared
    rows = []
    for each in explained.terms:
        if each.predicted:
            alone = f"x {each.factor:.3g}" if each.factor else "cannot alone"
            share = f"{each.predicted / compared.predicted:.1%}"
            rows.append((f"  {each.name}", f"{each.predicted:,.4f}", share, alone))
    rows.append(("predicted", f"{compared.predicted:,.4f}", "100.0%", ""))
    off = f"off by {compared.error:+.1f} %"
    rows.append(("measured", f"{compared.measured:,.4f}", "", off))
    if compared.peer:
        theirs = compared._replace(predicted=compared.peer)
        off = f"off by {theirs.error:+.1f} %"
        rows.append(("its authors' prediction", f"{compared.peer:,.4f}", "", off))
    return aligned((unit, "", "share", "alone explains it"), rows)


def unmeasured_table(unit: str, kinds: Mapping[str, float]) -> str:
    """Return a quantity of which the row says nothing, as predicted."""
    total = sum(kinds.values())
    rows = []
    for name, value in kinds.items():
        if value:
            rows.append((f"  {name}", f"{value:,.4f}", f"{value / total:.1%}"))
    rows.append(("predicted", f"{total:,.4f}", "100.0%"))
    return aligned((unit, "", "share"), rows) + "\n  (not measured)"


def levers_table(explained: Explained) -> str:
    """Return the constants on which seconds depend."""
    rows = []
    for each in explained.levers:
        alone = f"{each.explains:.4g}" if each.explains is not None else "cannot alone"
        reach = f"{each.least:,.4f} to {each.most:,.4f}"
        rows.append((f"  {each.name}", f"{each.value:.4g}", alone, reach))
    return aligned(("constant", "is", "would explain it", "seconds in its range"), rows)


def main(argv: Sequence[str]) -> int:
    """Explain a published row: where its seconds and bytes go, and which term explains the
    difference.
    """
    found = Parser("python -m minidist plan explain", description=main.__doc__)
    found.add_argument("row", help="the id of a row")
    found.add_argument("--rows", required=True, nargs="+", help="files of published rows, in JSON")
    found.add_argument("--format", choices=("text", "json"), default="text")
    asked = found.parse_args(argv)
    rows = [row for file in asked.rows for row in read(file) if isinstance(row, dict)]
    by_id = {str(row.get("id")): row for row in rows}
    if asked.row not in by_id:
        meant = nearest(asked.row, by_id)
        raise PlanError(f"no row has the id {asked.row!r}: {meant or 'look into the files'}")
    row, known = by_id[asked.row], Constants.table()
    with retold(PlanError, LeftOut, before=f"{asked.row} is left out: "):
        explained, run = explain(row, known), setup(row, known)
    if asked.format == "json":
        print(json.dumps([as_tree(each) for each in explained], indent=1))
    else:
        print(text(row, run, explained))
    return 0


def as_tree(explained: Explained) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        **explained.compared._asdict(),
        "terms": [each._asdict() for each in explained.terms],
        "levers": [each._asdict() for each in explained.levers],
    }
