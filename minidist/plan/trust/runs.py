"""`plan --as-published`: named runs with the software and the layout of their time, and the GPU hours that
are planned for them.

    published       GPU hours of the whole run, or seconds of a step
    as published    the same layout and software, predicted; what was not published is what a search finds best
    today           the best layout for the same model and batch on the same GPUs, with the newest software

Where whole runs are published, predicted hours count failures and checkpoints as `cost.py` does; a
step has none. `runs.toml` has the facts with their sources, and no constant belongs to a run.

`as_published.json` holds the table, because its searches take minutes:

    python -m minidist plan --as-published --format json > minidist/plan/trust/as_published.json
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from minidist.plan.cost import HOUR, cost
from minidist.plan.device import Machine, machine, site_of, table
from minidist.plan.memory import bytes_held
from minidist.plan.model import Model, model
from minidist.plan.run import Setup, Software
from minidist.plan.search import RESERVE, Found, search
from minidist.plan.step import step

AS_PUBLISHED = Path(__file__).with_name("as_published.json")
NEWEST = {  # software by generation of devices; any other has that of Hopper
    "volta": "megatron-core-ampere",
    "ampere": "megatron-core-ampere",
    "cdna": "megatron-rocm",
    "tpu": "xla",
    "trainium": "xla",
}
GRID = 400.0  # g of CO2 a kWh, of which no hours depend


def machine_of(said: Mapping[str, Any]) -> Machine:
    """Return where a run was computed."""
    if "cluster" in said:
        return machine(said["cluster"])
    return site_of(said["machine"]["device"], said["machine"])


def start_of(said: Mapping[str, Any], software: Software) -> Setup:
    """Return a run without its layout."""
    sizes = model(said["model"]) if "model" in said else Model(**said["sizes"])
    return Setup(
        sizes,
        machine_of(said),
        said["sequence"],
        said["batch"],
        software=software,
        precision="fp8" if said.get("fp8") else "bf16",
        fused_loss=True,
        hidden_tensor=sizes.parallel,
    )


def newest(where: Machine) -> Software:
    """Return the newest software that such devices have."""
    return Software.named(NEWEST.get(where.device.generation, "megatron-core-2026"))


def as_published(said: Mapping[str, Any]) -> Found:
    """Return a run in the layout and with the software of its time."""
    start, layout = start_of(said, Software.named(said["software"])), said.get("layout", {})
    if said.get("searched"):
        return best(start, layout)
    run = replace(start, **layout)
    return Found(run, step(run, exact=True), bytes_held(run))


def today(said: Mapping[str, Any]) -> Found:
    """Return the same run in the best layout, with the newest software."""
    return best(start_of(said, newest(machine_of(said))), {})


def best(start: Setup, layout: Mapping[str, Any]) -> Found:
    """Return the best layout that has these fields."""
    return search(start, layout, RESERVE).groups()[0][0]


def gpu_hours(said: Mapping[str, Any], found: Found) -> tuple[float, float]:
    """Return the GPU hours of a run as published and as planned: of the whole run, with its failures, or
    of its steps alone.
    """
    if "gpu_hours" in said:
        return said["gpu_hours"], cost(found, said["tokens"], None, GRID)["gpu_hours"]
    run = found.run
    steps = said["tokens"] / (run.batch * run.sequence)
    published, planned = (
        steps * seconds * run.machine.total / HOUR
        for seconds in (said["step_seconds"], found.seconds)
    )
    return published, planned


@cache
def stored() -> dict[str, Any]:
    """Return the table as it was written."""
    return dict(json.loads(AS_PUBLISHED.read_text(encoding="utf-8")))


def shares(of: str) -> list[float]:
    """Return planned GPU hours as shares of those that whole runs really took, in order.

    `of` is "planned", as they were published, or "today".
    """
    whole = [each for name, each in stored().items() if "gpu_hours" in table("runs")[name]]
    return sorted(each[of] / each["published"] for each in whole)


def optimism(goodput: float, mtbf: float) -> str:
    """Say what share of the GPU hours of published runs is planned for them, and what failures leave
    of the time if somebody asked (`mtbf` hours between two).
    """
    (least, middle, most), (least_now, middle_now, most_now) = optimism_tree().values()
    said = (
        f"an optimist's lower bound: {len(shares('planned'))} published runs, planned as they were run, "
        f"get {least:.2f} to {most:.2f} of the GPU hours that they really took (median {middle:.2f}), "
        f"and in the best layout of today {least_now:.2f} to {most_now:.2f} (median {middle_now:.2f}; "
        "docs/as-published.md)"
    )
    if mtbf:
        said += f"; with a failure every {mtbf:,.1f} h goodput is {goodput:.1%}, counted above"
    return said


def optimism_tree() -> dict[str, list[float]]:
    """Return the least, median and largest share of published GPU hours that is planned: as the runs
    were, and today.
    """
    found = {}
    for of in ("planned", "today"):
        values = shares(of)
        found[of] = [values[0], median(values), values[-1]]
    return found
