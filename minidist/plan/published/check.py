"""Each row of a file predicted, and beside it what was measured.

A `time` is the seconds of a step (throughputs are turned into it), a `memory` the GB of a GPU, a
`formula` what a paper computed itself. A `peer` is what the authors of a row predicted themselves,
with a planner of their own. `permute` lets measured values change places among the rows: a
prediction that knows something must then be far off. `ranking` looks at models of which several
layouts were measured: it asks what the layout predicted to be best really took.
"""

import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from minidist.full.data.files import FileError, parse, read_text, retold
from minidist.full.options import shown
from minidist.plan.device import Constants, PlanError
from minidist.plan.memory import GB, metered
from minidist.plan.parts.layer import passes
from minidist.plan.published.fields import LeftOut, PublishedRow, check_row
from minidist.plan.published.formulas import GIB, formulas
from minidist.plan.published.room import inferred, refused
from minidist.plan.published.rows import positive, seconds, setup
from minidist.plan.run import Setup
from minidist.plan.step import step

SOURCES_FILE = Path(__file__).with_name("sources.toml")
SOURCES = tomllib.loads(SOURCES_FILE.read_text(encoding="utf-8"))["source"]
SEVERAL = 4  # layouts of one model, from which they are ranked
# what layouts of one model have in common
SIZES = ("hidden", "layers", "seq", "gpus", "global_batch", "num_microbatches", "gpu", "precision")


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
    peers = {}
    with retold(LeftOut, FileError, before="it "):
        found = [*formulas(row)]
    if not found:
        run = setup(row, known)
        if row.get("kind") == "throughput" and not measured.get("oom"):
            with retold(LeftOut, ValueError):  # a schedule that does not go with these microbatches
                found.append(("time", predicted_seconds(row, run, exact), seconds(row, run)))
        found += memory(row, run)
        peers = peers_of(row, run)
    if not found:
        raise LeftOut("nothing measured that is predicted here")
    group = row.get("group") if isinstance(row.get("group"), str) else ""
    compared = []
    for quantity, predicted, value in found:
        peer = peers.get(quantity, 0.0)
        each = Compared(str(row["id"]), name_of(row), quantity, predicted, value, group or "", peer)
        compared.append(each)
    return compared


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


def unpublished(rows: Sequence[PublishedRow]) -> list[str]:
    """Return the rows whose memory was measured and is not compared."""
    found = []
    for row in rows:
        said = row.get("measured") if isinstance(row, dict) else None
        if isinstance(said, dict) and "peak_memory_gib" in said and inferred(row):
            found.append(str(row.get("id")))
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


def predicted_seconds(row: PublishedRow, run: Setup, exact: bool) -> float:
    """Return the seconds of the step, or of the one layer that the row measured."""
    if "single layer" in str(row["config"].get("scope")):
        return sum(each.seconds for each in passes(run))
    return sum(step(run, exact).values())


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
    others = permute(compared, permuted or 0)
    if permuted is not None:
        compared = others
    return {
        "sources": tabled(compared, others, source_of),
        "groups": tabled(compared, others, group_of),
        "rows": [each._asdict() for each in compared],
        "left_out": left_out,
        "ranking": ranked,
        "room": refused(rows, known),
        "inferred": unpublished(rows),
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
    """Return the errors of each line of a table, with those beside `others`' measured values.

    `peer` is the mean of |error| of `peers` rows that have one, `beside_peer` ours on the same rows.
    """
    lines: dict[str, list[tuple[Compared, Compared]]] = defaultdict(list)
    for each, other in zip(compared, others, strict=True):
        if name(each):
            lines[name(each)].append((each, other))
    found = {}
    for line, pairs in sorted(lines.items()):
        errors = [each.error for each, _ in pairs]
        found[line] = {"n": len(errors)} | measures(errors)
        found[line]["permuted"] = fmean(abs(other.error) for _, other in pairs)
        if peers := [each for each, _ in pairs if each.peer]:
            theirs = [each._replace(predicted=each.peer).error for each in peers]
            found[line] |= {
                "peers": len(peers),
                "peer": fmean(map(abs, theirs)),
                "beside_peer": fmean(abs(each.error) for each in peers),
            }
    return found


def measures(errors: Sequence[float]) -> dict[str, float]:
    """Return the mean and the median of |error|, and the bias."""
    sizes = [abs(error) for error in errors]
    return {"mean": fmean(sizes), "median": median(sizes), "bias": fmean(errors)}


def permute(compared: Sequence[Compared], seed: int) -> list[Compared]:
    """Return the same predictions in the same order, each beside a value that another row
    measured.
    """
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
    groups: dict[tuple[Any, ...], list[Compared]] = defaultdict(list)
    for row, each in compared:
        if each.quantity == "time":
            model = [row["config"].get(name) for name in SIZES]
            groups[each.source, publication(row), *model].append(each)
    found = []
    for (source, _, hidden, layers, *_), several in groups.items():
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
                    "chosen_id": order[0].id,
                    "best_id": best.id,
                    "place": order.index(best) + 1,
                }
            )
    return found


def publication(row: PublishedRow) -> str:
    """Return where a row was published, without the line."""
    return re.sub(r", line \d+.*", "", str(row.get("source")))
