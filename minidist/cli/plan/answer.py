"""What `plan` answers: layouts that differ, where their seconds and bytes go, the bill, and a
command for `train`.

`text` is for people, `as_json` for programs. `command.py` has asked the planner, and `runnable.py`
has asked `train`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minidist.cli.plan.between_sites import sites_text, sites_tree
from minidist.cli.plan.runnable import Offer, command
from minidist.draw.table import aligned
from minidist.full.mesh import AXES
from minidist.plan.compute.products import peak_of
from minidist.plan.cost import HOUR, REPAIR, cost, goodput, job_of
from minidist.plan.memory import GB
from minidist.plan.run import Setup
from minidist.plan.search import Answer, Found
from minidist.plan.sites.planned import PlannedSites
from minidist.plan.sites.ways import Wire
from minidist.plan.traffic import bytes_sent
from minidist.plan.trust.kinds import range_around, range_words, ranks_of, trust_tree, trusted
from minidist.plan.trust.runs import optimism, optimism_tree

SHOWN_VARIANTS = 2  # of a layout
CLOSE = 1.05  # a variant that takes longer, beside the best, is no news
KINDS = {
    "training": "trains",
    "redone": "is redone",
    "writing": "writes",
    "stopped": "stands still",
    "missing": "is missing",
    "closed_form": "trains, closed form",
}
"""Where the time goes when machines fail, and the heads of columns."""
LEGEND = """\
resident: what the driver counts beside tensors (its context, NCCL's buffers, gaps between tensors)
light-ends: embedding and head count as a layer each, so the first and the last stage have a layer less
order: the axes from the outermost; ranks along the last one are neighbours
experts: whole ones are shared out along ep and tp together, among ep x tp ranks, as Megatron does with
  --expert-model-parallel-size of that number and --expert-tensor-parallel-size 1"""


@dataclass(frozen=True)
class Bill:
    """What the run of a layout is to cost: see `cost`.

    `reserve` is the share of a GPU that stays free; `policy` how the run goes on when a machine is
    lost, and `repair` the hours until there is another.
    """

    tokens: float
    price: float | None
    grid: float
    mtbf: float
    reserve: float
    policy: str = "spare"
    repair: float = REPAIR
    asked: bool = False  # for what failures leave
    wire: Wire | None = None  # between several sites

    def of(self, found: Found) -> dict[str, float]:
        """Return the cost of a layout."""
        return cost(found, self.tokens, self.price, self.grid, self.mtbf, self.policy, self.repair)

    def goodput(self, found: Found) -> dict[str, dict[str, float]]:
        """Return where the time of a layout goes when machines fail, by policy."""
        return goodput(job_of(found, self.mtbf, self.repair))

    def sites(self, found: Found) -> PlannedSites | None:
        """Return several sites that have this layout; None if there is one."""
        if self.wire is None:
            return None
        job, policy = job_of(found, self.mtbf, self.repair), self.policy if self.asked else ""
        return PlannedSites(found, self.wire, job, policy)


def text(offers: Sequence[Offer], refused: Mapping[str, int], bill: Bill, answer: Answer) -> str:
    """Return what the command prints."""
    shown = [each.found for each in offers]
    run, gpus = shown[0].run, shown[0].run.machine.total
    sent = [
        {kind: bytes / gpus for kind, bytes in each.items()} | {"by all GPUs": sum(each.values())}
        for each in map(bytes_sent, (found.run for found in shown))
    ]
    parts = [
        f"{run.model.parameters / 1e9:,.1f}B parameters on {gpus:,} GPUs of {run.machine.name}, "
        f"{run.batch:,} sequences of {run.sequence:,} tokens a step; {bill.reserve:.0%} of a "
        "GPU's memory stays free",
        answer.another_batch,
        layouts(offers, bill),
        trusted(shown),
        by_kind("seconds of a step", [each.step for each in shown], 1.0),
        by_kind("GB of a GPU", [each.bytes for each in shown], GB),
        by_kind("GB a GPU sends a step", sent, GB),
        LEGEND,
        "\n".join(
            f"{place}. loses by {loses(shown[0], each)}"
            for place, each in enumerate(shown[1:], start=2)
        ),
        faster_but_larger(answer.missed, shown[0]),
        crossing(run),
        costs(shown[0], bill),
        failing(shown[0], bill),
        sites_text(sites, bill.tokens) if (sites := bill.sites(shown[0])) else "",
        "\n".join(f"refused: {count:,} that {reason}" for reason, count in by_count(refused)),
        "\n".join(lines(offers[0])),
    ]
    return "\n\n".join(part for part in parts if part)


def as_json(
    offers: Sequence[Offer], refused: Mapping[str, int], bill: Bill, answer: Answer
) -> dict[str, Any]:
    """Return the same for programs.

    A layout that `train` does not run has no command, and says why.
    """
    found = []
    shown = [offer.found for offer in offers]
    for offer, rank in zip(offers, ranks_of(shown), strict=True):
        each = offer.found
        found.append(
            {
                "layout": name_of(each.run),
                "rank": rank,
                "range": range_around(each.run, each.seconds),
                "variants": {name_of(other.run): other.seconds for other in shown_variants(offer)},
                "seconds": each.seconds,
                "mfu": mfu(each),
                "step": each.step,
                "bytes": each.bytes,
                "sent": bytes_sent(each.run),
                "links": crossing(each.run),
                "cost": bill.of(each),
                "goodput": bill.goodput(each),
                "sites": sites_tree(sites) if (sites := bill.sites(each)) else {},
                "command": [] if offer.refusal else command(each.run),
                "no_command": offer.refusal,
            }
        )
    said: dict[str, Any] = {"layouts": found, "refused": dict(refused), "reserve": bill.reserve}
    said["trust"] = trust_tree(shown)
    said["optimism"] = optimism_tree()
    said["batch"] = {
        "asked": answer.asked,
        "planned": answer.found[0].run.batch,
        "saved": answer.saved,
    }
    if missed := answer.missed:
        name = name_of(missed.run)
        said["missed"] = {"layout": name, "seconds": missed.seconds, "bytes": missed.bytes}
    return said


# ---------------------------------------------------------------- tables


def layouts(offers: Sequence[Offer], bill: Bill) -> str:
    """Return the table of layouts, each with its variants below it."""
    title = ("layout", "rank", "step", "range", "MFU", "tokens/s", "days", "money", "a GPU holds")
    rows: list[Sequence[str]] = []
    places = ranks_of([offer.found for offer in offers])
    for place, (offer, rank) in enumerate(zip(offers, places, strict=True), start=1):
        found, run = offer.found, offer.found.run
        price, speed = bill.of(found), run.batch * run.sequence / found.seconds
        rows.append(
            (
                f"{place} {name_of(run)}",
                str(rank),
                f"{found.seconds:,.2f} s",
                range_words(found),
                f"{mfu(found):.1%}",
                f"{speed:,.0f}",
                f"{price['days']:,.1f}",
                f"{price['money']:,.0f} $",
                f"{sum(found.bytes.values()) / GB:.1f} GB",
            )
        )
        for other in shown_variants(offer):
            seconds = f"{other.seconds:,.2f} s"
            rows.append((f"    or {name_of(other.run)}", "", seconds, *[""] * 6))
    return aligned(title, rows)


def shown_variants(offer: Offer) -> list[Found]:
    """Return the best variants of a layout that are nearly as fast as it is."""
    near = [each for each in offer.variants if each.seconds <= CLOSE * offer.found.seconds]
    return near[:SHOWN_VARIANTS]


def by_kind(title: str, values: Sequence[Mapping[str, float]], unit: float) -> str:
    """Return a table with a row for each kind that shows, and a column for each layout."""
    kinds = [kind for kind in values[0] if any(each[kind] >= 5e-4 * unit for each in values)]
    rows = [(f"  {kind}", *(figure(each[kind] / unit) for each in values)) for kind in kinds]
    return aligned((title, *map(str, range(1, len(values) + 1))), rows) if rows else ""


def figure(value: float) -> str:
    """Return a number of which four digits or more show."""
    return f"{value:,.3f}" if value < 100 else f"{value:,.1f}"


def by_count(refused: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return reasons and how many layouts each refused, the most first."""
    return sorted(refused.items(), key=lambda each: -each[1])


# ---------------------------------------------------------------- words


def words_of(run: Setup) -> list[str]:
    """Return a layout in words: what differs from one GPU alone."""
    axes = [
        f"{axis}={size}"
        for axis in ("tp", "pp", "cp", "ep", "dp")
        if (size := getattr(run, axis)) > 1
    ]
    if run.pp > 1:
        axes.append(f"{run.schedule} x{run.chunks}" if run.chunks > 1 else run.schedule)
        if run.ends_less:
            axes.append("light-ends")
    if run.order != AXES:
        axes.append(f"order={','.join(run.order)}")
    if run.zero > 0:
        axes.append(f"zero={run.zero}")
    if run.hsdp > 0:
        axes.append(f"hsdp={run.hsdp}")
    if run.recompute != "none":
        axes.append("recompute" if run.recompute == "full" else f"recompute={run.recompute}")
    if run.offload:
        axes.append("offload")
    return [*axes, f"microbatch={run.microbatch}"]


def name_of(run: Setup) -> str:
    """Return a layout in words."""
    return " ".join(words_of(run))


def mfu(found: Found) -> float:
    """Return the model's operations beside what all devices could do at the peak of the products'
    precision.
    """
    run = found.run
    peak = 0.0
    for site in run.machine.sites:
        peak += site.gpus * peak_of(site.device, run.precision)
    return run.model.flops(run.sequence) * run.batch * run.sequence / (found.seconds * peak)


def loses(best: Found, other: Found) -> str:
    """Say what another layout spends more on than the best, and how much it gains elsewhere."""
    more = sorted(((other.step[kind] - best.step[kind], kind) for kind in best.step), reverse=True)
    worse = ", ".join(f"{kind} +{seconds:,.3f} s" for seconds, kind in more[:3] if seconds > 5e-4)
    gained = -sum(seconds for seconds, _ in more if seconds < 0)
    return (worse or "nothing that shows") + (
        f"; elsewhere it gains {gained:,.3f} s" if gained > 5e-4 else ""
    )


def faster_but_larger(missed: Found | None, best: Found) -> str:
    """Say which layout would be faster if a GPU had more memory; nothing if none is."""
    if missed is None:
        return ""
    less = 1 - missed.seconds / best.seconds
    return (
        f"with more memory a step would take {less:.0%} less, {missed.seconds:,.2f} s, as "
        f"{name_of(missed.run)}: it holds {missed.held}"
    )


def crossing(run: Setup) -> str:
    """Say which axis crosses which link."""
    groups = {axis: group for axis in reversed(run.order) if (group := run.group(axis)).ranks > 1}
    where = {
        axis: "crosses nodes" if group.crosses(run.machine) else "stays inside nodes"
        for axis, group in groups.items()
    }
    said = "; ".join(f"{axis} {how}" for axis, how in where.items())
    if len(set(run.layers())) > 1 and not run.machine.slower:
        said += f"\nlayers of the ranks along pp: {' '.join(f'{each:g}' for each in run.layers())}"
    if run.machine.slower:
        crossed = 2 * run.batch * run.sequence * run.model.hidden * run.kept_width / GB
        said += (
            f"\nlayers of the stages: {', '.join(map(str, run.cut))}; {crossed:,.1f} GB a "
            "step cross the thin link: "
        )
        said += "activations and their gradients"
    return said


def costs(found: Found, bill: Bill) -> str:
    """Return the bill of a layout, what failures take, and how such bills compare with those of
    published runs.
    """
    paid = bill.of(found)
    around = range_around(found.run, paid["gpu_hours"])
    range = f" ({around[0]:,.0f} to {around[1]:,.0f})" if around else ""
    return (
        f"{paid['steps']:,} steps, {paid['gpu_hours']:,.0f} GPU hours{range}, {paid['money']:,.0f} $, "
        f"{paid['kwh']:,.0f} kWh, {paid['co2']:,.1f} t CO2 at {bill.grid:g} g a kWh\na failure "
        f"every {paid['mtbf_hours']:,.1f} h: save every {paid['every'] / 60:,.0f} min, "
        f"{paid['write']:,.0f} s each; {paid['writing']:.1%} of the time is writing, "
        f"{paid['lost']:.1%} is lost\n" + optimism(1 - paid["writing"] - paid["lost"], bill.mtbf)
    )


def failing(found: Found, bill: Bill) -> str:
    """Return the table of what failures leave of the time, by policy; nothing unless somebody has
    asked.
    """
    if not bill.asked:
        return ""
    job = job_of(found, bill.mtbf, bill.repair)
    rows = [
        (f"  {policy}", *(f"{each[kind]:.1%}" for kind in KINDS))
        for policy, each in bill.goodput(found).items()
    ]
    said = (
        f"a failure every {job.mtbf / HOUR:,.2f} h; a restart takes {job.restart:,.0f} s, those who "
        f"go on stand still for {job.stall:,.0f} s, and a machine is repaired in "
        f"{job.repair / HOUR:,.1f} h (assumed: see minidist/plan/cost.py)"
    )
    lacks = f"zero={found.run.zero} keeps the optimizer's shards once" if found.run.zero else ""
    if job.replicas == 1:
        lacks = "this layout has one replica, and so nobody does"
    if lacks:
        said += f"\nreplace and quorum need a peer that holds the same: {lacks}"
    return aligned(("share of the time", *KINDS.values()), rows) + f"\n{said}"


def lines(offer: Offer) -> list[str]:
    """Return the command of a layout, or why there is none."""
    if offer.refusal:
        return [f"there is no command of `train` for 1: {offer.refusal}"]
    return command(offer.found.run)
