"""Each row of a file predicted, and what was measured.

A `time` is the seconds of a step (throughputs are turned into it), a `memory` the GB of a GPU, a
`formula` what a paper computed itself. A `peer` is what the authors of a row predicted themselves,
with a planner of their own. `permute` lets measured values change places among the rows: a
prediction that knows something must then be far off. `ranking` looks at models of which several
layouts were measured: it asks what the layout predicted to be best really took. `room` counts the
runs that ran and that the planner would refuse.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from minidist.full.data.files import FileError, parse, read_text, retold
from minidist.full.options import shown
from minidist.plan.device import Constants, PlanError, table
from minidist.plan.memory import GB, bytes_held, metered
from minidist.plan.parts.layer import passes
from minidist.plan.published.fields import LeftOut, PublishedRow, check_row, positive, text
from minidist.plan.published.formulas import GIB, formulas
from minidist.plan.published.rows import seconds, setup
from minidist.plan.run import Setup
from minidist.plan.step import step

SEVERAL = 4  # layouts of one model, from which they are ranked
SIZES = ("hidden", "layers", "seq", "gpus", "global_batch", "num_microbatches", "gpu", "precision")
"""What layouts of one model have in common."""


class Compared(NamedTuple):
    """One quantity of one row; the report calls the place where it was published `source`.

    A `group` has rows of one kind, if the file names one. `peer` is 0 where nobody else predicted.
    """

    id: str
    source: str
    quantity: str
    predicted: float
    measured: float
    group: str = ""
    peer: float = 0.0

    @property
    def error(self) -> float:
        """How far off the prediction is, in percent."""
        return 100 * (self.predicted / self.measured - 1)


def read(path: str) -> list[PublishedRow]:
    """Return the rows of a file in JSON. Each is checked when it is predicted.

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
    entries: Any = table("sources")["source"]
    for entry in entries:
        if source.startswith(entry["begins"]):
            return str(entry["name"])
    return "others"


# ---------------------------------------------------------------- one row


def compare(row: PublishedRow, known: Constants, exact: bool = True) -> list[Compared]:
    """Return each quantity of a row that can be predicted.

    Raises
    ------
    LeftOut
        If the row has none, or is not a row.
    """
    check_row(row)
    peers: dict[str, float] = {}
    with retold(LeftOut, FileError, before="it "):
        found = [*formulas(row)]
    if not found:
        run = setup(row, known)
        if was_timed(row):
            with retold(LeftOut, ValueError):  # a schedule that does not go with these microbatches
                found.append(("time", predicted_seconds(row, run, exact), seconds(row, run)))
        found += memory(row, run)
        peers = peers_of(row, run)
    if not found:
        raise LeftOut("nothing measured that is predicted here")
    group = row["group"] if isinstance(row.get("group"), str) else ""
    id, source = str(row["id"]), name_of(row)
    return [
        Compared(id, source, quantity, predicted, measured, group, peers.get(quantity, 0.0))
        for quantity, predicted, measured in found
    ]


def was_timed(row: PublishedRow) -> bool:
    """Tell whether a row is of a run that ran."""
    return row.get("kind") == "throughput" and not row["measured"].get("oom")


def predicted_seconds(row: PublishedRow, run: Setup, exact: bool) -> float:
    """Return the seconds of the step, or of the one layer that the row measured."""
    if "single layer" in str(row["config"].get("scope")):
        return sum(each.seconds for each in passes(run))
    return sum(step(run, exact).values())


def memory(row: PublishedRow, run: Setup) -> list[tuple[str, float, float]]:
    """Return what a row's meters showed of a GPU's memory, in GB, behind what is predicted.

    The allocator's meters count in GiB. Nothing if the row did not find its microbatch or what it computes
    again in its source, because memory is in proportion to them.
    """
    measured = row["measured"]
    gibibytes = "peak_memory_gib" in measured or run.software.measured == "allocated"
    unit = GIB / GB if gibibytes else 1.0
    found: list[tuple[str, float, float]] = []
    if inferred(row):
        return found
    if peak := positive(measured, "memory_gb") or positive(measured, "peak_memory_gib"):
        found.append(("memory", sum(metered(run).values()) / GB, peak * unit))
    if reserved := positive(row, "reserved_gib"):
        planned = sum(metered(run, "reserved").values()) / GB
        found.append(("memory reserved", planned, reserved * GIB / GB))
    return found


def peers_of(row: PublishedRow, run: Setup) -> dict[str, float]:
    """Return what the authors of a row predicted, by quantity; 0 for what they did not.

    Raise LeftOut if that is no number.
    """
    said = row.get("peer") or {}
    if not isinstance(said, dict):
        raise LeftOut(f"it has peer = {shown(said)}, which names no quantity")
    seconds = positive(said, "ms") / 1e3
    if rate := positive(said, "tok"):  # tokens a second and GPU
        seconds = run.batch * run.sequence / (rate * run.machine.gpus)
    return {
        "time": seconds,
        "memory": positive(said, "gib") * GIB / GB,
        "memory reserved": positive(said, "reserved_gib") * GIB / GB,
    }


def inferred(row: PublishedRow) -> str:
    """Return which fields that memory is in proportion to a row does not have from its source; nothing
    if none.
    """
    config = row.get("config")
    said = text(config, "inferred") if isinstance(config, dict) else ""
    return " and ".join(name for name in ("micro_batch", "recompute") if name in said)


def explanation(row: PublishedRow, run: Setup) -> str:
    """Return under which setting that its row does not tell a run that ran would fit.

    Recipes may compute norms and activations again (Megatron Core's recompute_modules), or send
    activations to the host's memory (cpu_offloading_num_layers, MaxText's "offload").
    """
    if fields := inferred(row):
        verb = "were" if " and " in fields else "was"
        return f"its {fields} {verb} not published"
    has, held = run.machine.device.memory, bytes_held(run)
    needs = sum(held.values())
    if needs - held["resident"] <= has:
        return "its tensors alone fit"
    may_compute_again = run.recompute == "none" and run.software.engine
    if may_compute_again and sum(bytes_held(replace(run, recompute="parts")).values()) <= has:
        return "it fits if it computes norms and activations again"
    if needs - has <= held["activations"]:
        return "it fits with activations of some layers in the host's memory"
    return "nothing that is known explains it"


# ---------------------------------------------------------------- all rows


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
            id = (row.get("id") if isinstance(row, dict) else None) or f"row {place}"
            left_out.append({"id": id, "source": name_of(row), "why": str(reason)})
    compared = [each for _, each in found]
    others = permute(compared, permuted or 0)
    if permuted is not None:
        compared = others
    return {
        "sources": tabled(compared, others, source_of),
        "groups": tabled(compared, others, group_of),
        "rows": [each._asdict() for each in compared],
        "left_out": left_out,
        "ranking": ranking(found),
        "room": room(rows, known),
        "inferred": [str(row.get("id")) for row in rows if unpublished(row)],
    }


def source_of(each: Compared) -> str:
    """Return the line of the first table that a value belongs to."""
    return each.source if each.quantity == "time" else each.quantity


def group_of(each: Compared) -> str:
    """Return the line of the second table; nothing if the file names no group."""
    if not each.group or each.quantity == "time":
        return each.group
    return f"{each.group}, {each.quantity}"


def tabled(
    compared: Sequence[Compared], others: Sequence[Compared], name: Callable[[Compared], str]
) -> dict[str, dict[str, float]]:
    """Return by line of a table the mean and the median of |error|, the bias, and the mean with
    `others`' measured values.

    `peer` is the mean of |error| of `peers` rows that have one, `beside_peer` ours on the same rows.
    """
    lines: dict[str, list[tuple[Compared, Compared]]] = defaultdict(list)
    for each, other in zip(compared, others, strict=True):
        if name(each):
            lines[name(each)].append((each, other))
    found = {}
    for line, pairs in sorted(lines.items()):
        errors = [each.error for each, _ in pairs]
        found[line] = {
            "n": len(errors),
            "mean": fmean(map(abs, errors)),
            "median": median(map(abs, errors)),
            "bias": fmean(errors),
            "permuted": fmean(abs(other.error) for _, other in pairs),
        }
        if peers := [each for each, _ in pairs if each.peer]:
            found[line] |= {
                "peers": len(peers),
                "peer": fmean(abs(each._replace(predicted=each.peer).error) for each in peers),
                "beside_peer": fmean(abs(each.error) for each in peers),
            }
    return found


def permute(compared: Sequence[Compared], seed: int) -> list[Compared]:
    """Return the same predictions in the same order, each with a value that another row measured."""
    generator = random.Random(seed)
    found = [*compared]
    for quantity in sorted({each.quantity for each in compared}):
        places = [place for place, each in enumerate(compared) if each.quantity == quantity]
        values = generator.sample([compared[place].measured for place in places], len(places))
        for place, value in zip(places, values, strict=True):
            found[place] = compared[place]._replace(measured=value)
    return found


def ranking(compared: Sequence[tuple[PublishedRow, Compared]]) -> list[dict[str, Any]]:
    """Return, for each model with several layouts, what the one predicted best took, and the place
    of the best.

    Layouts are of one model if the same people measured them with the same batch on as many of the
    same GPUs.
    """
    models: dict[tuple[Any, ...], list[Compared]] = defaultdict(list)
    for row, each in compared:
        if each.quantity == "time":
            publication = re.sub(r", line \d+.*", "", str(row.get("source")))
            sizes = [row["config"].get(name) for name in SIZES]
            models[each.source, publication, *sizes].append(each)
    found = []
    for (source, _, hidden, layers, *_), several in models.items():
        best = min(several, key=lambda each: each.measured)
        order = sorted(several, key=lambda each: each.predicted)
        if len(several) >= SEVERAL and best.measured < max(each.measured for each in several):
            found.append(
                {
                    "source": source,
                    "hidden": hidden,
                    "layers": layers,
                    "layouts": len(several),
                    "chosen": order[0].measured / best.measured,
                    "chosen_id": order[0].id,
                    "best_id": best.id,
                    "place": order.index(best) + 1,
                }
            )
    return found


def room(rows: Sequence[PublishedRow], known: Constants) -> dict[str, Any]:
    """Return how many runs ran, and those that are predicted to need more GB than their GPUs have."""
    ran, refused = 0, []
    for row in rows:
        try:
            run = setup(row, known)
        except LeftOut:
            continue
        if was_timed(row):
            ran += 1
            needs, has = sum(bytes_held(run).values()), run.machine.device.memory
            if needs > has:
                sizes = {"id": str(row["id"]), "needs": needs / GB, "has": has / GB}
                refused.append(sizes | {"why": explanation(row, run)})
    return {"ran": ran, "refused": refused}


def unpublished(row: Any) -> bool:
    """Tell whether a row's memory was measured and is not compared."""
    said = row.get("measured") if isinstance(row, dict) else None
    return isinstance(said, dict) and "peak_memory_gib" in said and bool(inferred(row))
