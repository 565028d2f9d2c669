"""`plan check`: each row of a file predicted, and beside it what was measured.

`time` is of a step (throughputs are turned into it), `memory` in GB of a GPU, `formula` what a paper computed itself.
`permute` lets measured values change places among the rows: a prediction that knows something must then be far off.
`ranking` asks, where several layouts of one model were measured, what the layout predicted to be best really took.
"""

import argparse
import json
import random
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from minidist.plan.device import Constants, PlanError, read_tree
from minidist.plan.equation import layer_activations, layer_input, model_states
from minidist.plan.held import GB, held
from minidist.plan.published.rows import LeftOut, Row, seconds, setup
from minidist.plan.run import Setup
from minidist.plan.step import passes, step

SOURCES = tomllib.loads(Path(__file__).with_name("sources.toml").read_text(encoding="utf-8"))["source"]
GIB = 2.0**30
SEVERAL = 4  # layouts of one model, from which they are ranked
POLICIES = {  # what a column of Korthikanti et al. 2022, figure 7, recomputes, and whether sequences are cut
    "seqpar_pct": ("none", True),
    "selective_pct": ("selective", False),
    "seqpar_selective_pct": ("selective", True),
    "full_pct": ("full", False),
}


class Compared(NamedTuple):
    """One quantity of one row; `source` is how the report calls where it comes from."""

    id: str
    source: str
    quantity: str
    predicted: float
    measured: float


def read(path: str) -> list[Row]:
    """Return the rows of a file in the format of `rows.json`.

    Raises
    ------
    PlanError
        If it is no such file.
    """
    rows: Any = read_tree(path, json.loads)
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "measured" in row for row in rows):
        raise PlanError(f"{path} is no list of rows, each with id, source, kind, config and measured")
    return rows


def name_of(row: Row) -> str:
    """Return how the report calls a row's source."""
    source = str(row.get("source"))
    return str(next((entry["name"] for entry in SOURCES if source.startswith(entry["begins"])), "others"))


def compare(row: Row, known: Constants, exact: bool = True) -> list[Compared]:
    """Return each quantity of a row that can be predicted.

    Raises
    ------
    LeftOut
        If there is none.
    """
    found, measured = [*formulas(row)], row["measured"]
    if not found:
        run = setup(row, known)
        if row.get("kind") == "throughput" and not measured.get("oom"):
            found.append(("time", predicted_seconds(row, run, exact), seconds(row, run)))
        unit = GIB / GB if "peak_memory_gib" in measured or run.software.measured == "tensors" else 1.0
        if gigabytes := measured.get("memory_gb") or measured.get("peak_memory_gib"):
            found.append(("memory", sum(held(run).values()) / GB, gigabytes * unit))
    if not found:
        raise LeftOut("nothing measured that is predicted here")
    return [Compared(str(row["id"]), name_of(row), *each) for each in found]


def predicted_seconds(row: Row, run: Setup, exact: bool) -> float:
    """Return the seconds of the step, or of the one layer that the row measured."""
    if "single layer" in str(row["config"].get("scope")):
        return sum(each.whole for each in passes(run))
    return sum(step(run, exact).values())


def formulas(row: Row) -> Iterator[tuple[str, float, float]]:
    """Yield what a paper computed by a formula that `equation.py` has too, beside our value."""
    config, measured = row.get("config") or {}, row["measured"]
    values = {}
    if "pos_gb" in measured:
        for stage, name in enumerate(("pos_gb", "pos_g_gb", "pos_g_p_gb"), start=1):
            values[name] = model_states(config["params_b"] * 1e9, config["dp"], stage).total / GB
    if "params_opt_gib" in measured:
        count = 12 * config["layers"] * config["hidden"] ** 2 / (config["tp"] * config["pp"])
        values["params_opt_gib"] = 18 * count / GIB
        values["activations_gib"] = stored(config, config["recompute"], config["sequence_parallel"]) / GIB
    if "tp_baseline_pct" in measured:
        whole = stored(config, "none", False)
        values = {name: 100 * stored(config, *policy) / whole for name, policy in POLICIES.items()}
    for name, value in values.items():
        printed = measured[name]  # known to a unit of its last digit
        last = 10.0 ** -len(str(printed).partition(".")[2]) if isinstance(printed, float) else 1.0
        yield "formula", printed if abs(value - printed) < last else value, printed


def stored(config: Row, recompute: str, sp: bool) -> float:
    """Return the activations of the first stage, in bytes. (Korthikanti et al. 2022, equations 2 to 6.)"""
    sizes = (config["seq"], config["micro_batch"], config["hidden"])
    kept = layer_activations(*sizes, config["heads"], config["tp"], sp, attention_weights=recompute == "none")
    pp, chunks = config["pp"], config.get("virtual_pp") or 1
    more = 1 + (pp - 1) / (pp * chunks) if chunks > 1 else 1
    return (layer_input(*sizes) if recompute == "full" else kept) * float(config["layers"]) * more


def check(rows: Sequence[Row], known: Constants, permuted: int | None = None, exact: bool = True) -> dict[str, Any]:
    """Return the report as it is written in JSON: errors in percent."""
    compared: list[Compared] = []
    left_out = []
    for row in rows:
        try:
            compared += compare(row, known, exact)
        except LeftOut as reason:
            left_out.append({"id": row.get("id"), "source": name_of(row), "why": str(reason)})
    ranked = ranking(rows, compared)
    compared = compared if permuted is None else permute(compared, permuted)
    groups: dict[str, list[float]] = defaultdict(list)
    for each in compared:
        error = 100 * (each.predicted / each.measured - 1)
        groups[each.source if each.quantity == "time" else each.quantity].append(error)
    sources = {name: {"n": len(errors)} | measures(errors) for name, errors in sorted(groups.items())}
    return {"sources": sources, "rows": [each._asdict() for each in compared], "left_out": left_out, "ranking": ranked}


def measures(errors: Sequence[float]) -> dict[str, float]:
    """Return the mean and the median of |error|, and the bias."""
    sizes = [abs(error) for error in errors]
    return {"mean": fmean(sizes), "median": median(sizes), "bias": fmean(errors)}


def permute(compared: Sequence[Compared], seed: int) -> list[Compared]:
    """Return the same predictions, each beside a value that another row measured."""
    generator, found = random.Random(seed), []
    for quantity in sorted({each.quantity for each in compared}):
        same = [each for each in compared if each.quantity == quantity]
        values = generator.sample([each.measured for each in same], len(same))
        found += [each._replace(measured=value) for each, value in zip(same, values, strict=True)]
    return found


def ranking(rows: Sequence[Row], compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return, for each model with several layouts, what the one predicted best took, and the place of the best."""
    config = {str(row.get("id")): row.get("config") or {} for row in rows}
    groups: dict[tuple[Any, ...], list[Compared]] = defaultdict(list)
    for each in compared:
        if each.quantity == "time" and config[each.id].get("gpus"):
            sizes = ("hidden", "layers", "seq", "gpus", "global_batch", "num_microbatches")
            groups[each.source, *(config[each.id].get(name) for name in sizes)].append(each)
    found = []
    for (source, hidden, layers, *_), several in groups.items():
        best = min(several, key=lambda each: each.measured)
        order = sorted(several, key=lambda each: each.predicted)
        if len(several) >= SEVERAL and best.measured < max(each.measured for each in several):
            what = {"source": source, "hidden": hidden, "layers": layers, "layouts": len(several)}
            found.append(what | {"chosen": order[0].measured / best.measured, "place": order.index(best) + 1})
    return found


def text(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    bounds = {entry["name"]: entry.get("bound") for entry in SOURCES} | {"memory": 5, "formula": 0}
    lines = [f"{'source':<20}{'rows':>6}{'mean |error|':>14}{'median':>9}{'bias':>9}   bound of the mean"]
    for name, each in report["sources"].items():
        errors = f"{each['mean']:>12.2f} %{each['median']:>7.2f} %{each['bias']:>7.1f} %"
        lines.append(f"{name:<20}{each['n']:>6}{errors}   {bounds.get(name) or ''}")
    for name in sorted({each["source"] for each in report["ranking"]}):
        took = [each["chosen"] for each in report["ranking"] if each["source"] == name]
        early = sum(each["place"] <= 5 for each in report["ranking"] if each["source"] == name)
        lines.append(
            f"{name}: of {len(took)} models with several layouts, the one predicted best took {fmean(took):.3f} of the "
            f"best (at most {max(took):.3f}); the best is among the first five of {early}"
        )
    reasons = Counter((each["source"], each["why"]) for each in report["left_out"])
    lines += [f"left out: {count} of {source}: {why}" for (source, why), count in sorted(reasons.items())]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print predictions beside published measurements, or with --permuted beside those of other rows."""
    found = argparse.ArgumentParser("python -m minidist plan check", description=main.__doc__)
    found.add_argument("--rows", required=True, help="a file of published rows, in JSON")
    found.add_argument("--permuted", type=int, metavar="SEED", help="let measured values change places")
    found.add_argument("--format", choices=("text", "json"), default="text")
    asked = found.parse_args(argv)
    rows, known = read(asked.rows), Constants.table()
    report = check(rows, known, asked.permuted)
    if asked.format == "json":
        print(json.dumps(report, indent=1))
        return 0
    print(text(report))
    if asked.permuted is None:
        apart = check(rows, known, permuted=0, exact=False)["sources"]
        far = ", ".join(f"{name} {each['mean']:.0f} %" for name, each in apart.items())
        print(f"the same beside measured values of other rows, which must be far off: {far}")
    return 0
