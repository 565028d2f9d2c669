"""`plan check`: each row of a file predicted, and beside it what was measured.

A `time` is the seconds of a step (throughputs are turned into it), a `memory` the GB of a GPU, a
`formula` what a paper computed itself. `permute` lets measured values change places among the rows:
a prediction that knows something must then be far off. `ranking` looks at models of which several
layouts were measured: it asks what the layout predicted to be best really took.
"""

import json
import random
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from minidist.launch.parser import Parser
from minidist.plan.device import Constants, PlanError
from minidist.plan.equation import layer_activations, layer_input, model_states
from minidist.plan.memory import GB, bytes_held
from minidist.plan.parts.layer import passes
from minidist.plan.published.fields import NUMBERS, READ, LeftOut, PublishedRow, check_row
from minidist.plan.published.rows import positive, seconds, setup
from minidist.plan.run import Setup
from minidist.plan.step import step
from minidist.trainer.files import FileError, at, parse, read_text, retold

SOURCES_FILE = Path(__file__).with_name("sources.toml")
SOURCES = tomllib.loads(SOURCES_FILE.read_text(encoding="utf-8"))["source"]
GIB = 2.0**30
SEVERAL = 4  # layouts of one model, from which they are ranked
# what a column of Korthikanti et al. 2022, figure 7, recomputes, and whether sequences are cut
POLICIES = {
    "seqpar_pct": ("none", True),
    "selective_pct": ("selective", False),
    "seqpar_selective_pct": ("selective", True),
    "full_pct": ("full", False),
}


class Compared(NamedTuple):
    """One quantity of one row; the report calls the place where it was published `source`."""

    id: str
    source: str
    quantity: str
    predicted: float
    measured: float


def read(path: str) -> list[PublishedRow]:
    """Return the rows of a file in the format of `rows.json`. Each is checked when it is predicted.

    Raises
    ------
    PlanError
        If the file is missing or holds something else.
    """
    with retold(PlanError, FileError, before=f"{path} "):
        rows = parse(read_text(Path(path)))
    if not isinstance(rows, list):
        raise PlanError(
            f"{path} is not a list of rows, each with id, source, kind, config and measured"
        )
    return rows


def name_of(row: PublishedRow) -> str:
    """Return how the report calls a row's source."""
    source = str(row.get("source")) if isinstance(row, dict) else ""
    for entry in SOURCES:
        if source.startswith(entry["begins"]):
            return str(entry["name"])
    return "others"


def compare(row: PublishedRow, known: Constants, exact: bool = True) -> list[Compared]:
    """Return each quantity of a row that can be predicted.

    Raises
    ------
    LeftOut
        If the row has none, or is not a row.
    """
    check_row(row)
    measured = row["measured"]
    with retold(LeftOut, FileError, before="it "):
        found = [*formulas(row)]
    if not found:
        run = setup(row, known)
        if row.get("kind") == "throughput" and not measured.get("oom"):
            with retold(LeftOut, ValueError):  # a schedule that does not go with these microbatches
                found.append(("time", predicted_seconds(row, run, exact), seconds(row, run)))
        gibibytes = "peak_memory_gib" in measured or run.software.measured == "tensors"
        unit = GIB / GB if gibibytes else 1.0
        if peak := positive(measured, "memory_gb") or positive(measured, "peak_memory_gib"):
            planned = sum(bytes_held(run).values()) / GB
            found.append(("memory", planned, peak * unit))
    if not found:
        raise LeftOut("nothing measured that is predicted here")
    return [Compared(str(row["id"]), name_of(row), *each) for each in found]


def predicted_seconds(row: PublishedRow, run: Setup, exact: bool) -> float:
    """Return the seconds of the step, or of the one layer that the row measured."""
    if "single layer" in str(row["config"].get("scope")):
        return sum(each.seconds for each in passes(run))
    return sum(step(run, exact).values())


def formulas(row: PublishedRow) -> Iterator[tuple[str, float, float]]:
    """Yield what a paper computed by a formula that `equation.py` has too, beside our value."""
    config, measured = row.get("config") or {}, row["measured"]
    values = {}
    if "pos_gb" in measured:
        billions = at(config, "params_b", kind=float, limit=READ["params_b"][1])
        ranks = size(config, "dp")
        for stage, name in enumerate(("pos_gb", "pos_g_gb", "pos_g_p_gb"), start=1):
            values[name] = model_states(billions * 1e9, ranks, stage).total / GB
    if "params_opt_gib" in measured:
        all_layers = 12 * size(config, "layers") * size(config, "hidden") ** 2
        count = all_layers / (size(config, "tp") * size(config, "pp"))
        recompute = at(config, "recompute", kind=str)
        sp = at(config, "sequence_parallel", kind=bool)
        values["params_opt_gib"] = 18 * count / GIB
        values["activations_gib"] = stored(config, recompute, sp) / GIB
    if "tp_baseline_pct" in measured:
        whole = stored(config, "none", False)
        for name, policy in POLICIES.items():
            values[name] = 100 * stored(config, *policy) / whole
    for name, value in values.items():
        if not positive(measured, name):
            raise LeftOut(f"it has no {name}")
        printed = measured[name]
        # what is printed is known to a unit of its last digit: nearer than that is equal
        unit = 1.0
        if isinstance(printed, float):
            digits = str(printed).partition(".")[2]
            unit = 10.0 ** -len(digits)
        equal = abs(value - printed) < unit
        yield "formula", printed if equal else value, printed


def stored(config: PublishedRow, recompute: str, sp: bool) -> float:
    """Return the activations of the first stage, in bytes. (Korthikanti et al. 2022, equations 2 to
    6.)
    """
    sizes = size(config, "seq"), size(config, "micro_batch"), size(config, "hidden")
    heads, tp = size(config, "heads"), size(config, "tp")
    if recompute == "full":
        kept = layer_input(*sizes)
    else:
        kept = layer_activations(*sizes, heads, tp, sp, attention_weights=recompute == "none")
    pp = size(config, "pp")
    chunks = size(config, "virtual_pp") if config.get("virtual_pp") else 1
    more = 1 + (pp - 1) / (pp * chunks) if chunks > 1 else 1
    return kept * float(size(config, "layers")) * more


def size(config: PublishedRow, name: str) -> int:
    """Return a whole number of a configuration; raise FileError if it says none."""
    return int(at(config, name, kind=int, limit=NUMBERS["size"][1]))


def check(
    rows: Sequence[PublishedRow], known: Constants, permuted: int | None = None, exact: bool = True
) -> dict[str, Any]:
    """Return the report as it is written in JSON: errors in percent."""
    found: list[tuple[PublishedRow, Compared]] = []
    left_out = []
    for place, row in enumerate(rows, start=1):
        try:
            found += [(row, each) for each in compare(row, known, exact)]
        except LeftOut as reason:
            known_as = row.get("id") if isinstance(row, dict) else None
            id = known_as or f"row {place}"
            left_out.append({"id": id, "source": name_of(row), "why": str(reason)})
    ranked = ranking(found)
    compared = [each for _, each in found]
    if permuted is not None:
        compared = permute(compared, permuted)
    groups: dict[str, list[float]] = defaultdict(list)
    for each in compared:
        error = 100 * (each.predicted / each.measured - 1)
        group = each.source if each.quantity == "time" else each.quantity
        groups[group].append(error)
    sources = {}
    for name, errors in sorted(groups.items()):
        sources[name] = {"n": len(errors)} | measures(errors)
    return {
        "sources": sources,
        "rows": [each._asdict() for each in compared],
        "left_out": left_out,
        "ranking": ranked,
    }


def measures(errors: Sequence[float]) -> dict[str, float]:
    """Return the mean and the median of |error|, and the bias."""
    sizes = [abs(error) for error in errors]
    return {"mean": fmean(sizes), "median": median(sizes), "bias": fmean(errors)}


def permute(compared: Sequence[Compared], seed: int) -> list[Compared]:
    """Return the same predictions, each beside a value that another row measured."""
    generator = random.Random(seed)
    found = []
    for quantity in sorted({each.quantity for each in compared}):
        same = [each for each in compared if each.quantity == quantity]
        values = generator.sample([each.measured for each in same], len(same))
        for each, value in zip(same, values, strict=True):
            found.append(each._replace(measured=value))
    return found


def ranking(compared: Sequence[tuple[PublishedRow, Compared]]) -> list[dict[str, Any]]:
    """Return, for each model with several layouts, what the one predicted best took, and the place
    of the best.
    """
    groups: dict[tuple[Any, ...], list[Compared]] = defaultdict(list)
    for row, each in compared:
        if each.quantity == "time":
            sizes = ("hidden", "layers", "seq", "gpus", "global_batch", "num_microbatches")
            model = [row["config"].get(name) for name in sizes]
            groups[each.source, *model].append(each)
    found = []
    for (source, hidden, layers, *_), several in groups.items():
        best = min(several, key=lambda each: each.measured)
        order = sorted(several, key=lambda each: each.predicted)
        slowest = max(each.measured for each in several)
        if len(several) >= SEVERAL and best.measured < slowest:
            found.append(
                {
                    "source": source,
                    "hidden": hidden,
                    "layers": layers,
                    "layouts": len(several),
                    "chosen": order[0].measured / best.measured,
                    "place": order.index(best) + 1,
                }
            )
    return found


def text(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    bounds = {entry["name"]: entry.get("bound") for entry in SOURCES}
    bounds |= {"memory": 5, "formula": 0}
    lines = [
        f"{'source':<20}{'rows':>6}{'mean |error|':>14}{'median':>9}{'bias':>9}   bound of the mean"
    ]
    for name, each in report["sources"].items():
        errors = f"{each['mean']:>12.2f} %{each['median']:>7.2f} %{each['bias']:>7.1f} %"
        lines.append(f"{name:<20}{each['n']:>6}{errors}   {bounds.get(name) or ''}")
    for name in sorted({each["source"] for each in report["ranking"]}):
        ranked = [each for each in report["ranking"] if each["source"] == name]
        took = [each["chosen"] for each in ranked]
        early = sum(each["place"] <= 5 for each in ranked)
        lines.append(
            f"{name}: of {len(took)} models with several layouts, the one predicted best took "
            f"{fmean(took):.3f} of the best (at most {max(took):.3f}); the best is among the "
            f"first five of {early}"
        )
    predicted = len({each["id"] for each in report["rows"]})
    lines.append(f"{predicted} rows are predicted, {len(report['left_out'])} are left out")
    reasons = Counter((each["source"], each["why"]) for each in report["left_out"])
    lines += [
        f"left out: {count} of {source}: {why}" for (source, why), count in sorted(reasons.items())
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print predictions beside published measurements, or with --permuted beside those of other
    rows.
    """
    found = Parser("python -m minidist plan check", description=main.__doc__)
    found.add_argument("--rows", required=True, help="a file of published rows, in JSON")
    found.add_argument(
        "--permuted", type=int, metavar="SEED", help="let measured values change places"
    )
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
