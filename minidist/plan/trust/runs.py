"""`plan --as-published`: named runs with the software and the layout of their time, and beside their GPU
hours those that are planned.

    published       GPU hours of the whole run, or seconds of a step
    as published    the same layout and software, predicted; what was not published is what a search finds best
    today           the best layout for the same model and batch on the same GPUs, with the newest software

Where whole runs are published, predicted hours count failures and checkpoints as `cost.py` does; a
step has none. `runs.toml` has the facts with their sources, and no constant belongs to a run.

`as_published.json` holds the table, because its searches take minutes:

    python -m minidist plan --as-published --format json > minidist/plan/trust/as_published.json
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from minidist.plan.cost import HOUR, cost
from minidist.plan.device import Device, Machine, PlanError, machine, ranges
from minidist.plan.memory import bytes_held
from minidist.plan.model import Model, model
from minidist.plan.run import Setup, Software
from minidist.plan.search import RESERVE, Found, search
from minidist.plan.step import step

FILE = Path(__file__).with_name("runs.toml")
AS_PUBLISHED = Path(__file__).with_name("as_published.json")
NEWEST = {  # software by generation of devices; any other has that of Hopper
    "volta": "megatron-core-ampere",
    "ampere": "megatron-core-ampere",
    "cdna": "megatron-rocm",
    "tpu": "xla",
    "trainium": "xla",
}
GRID = 400.0  # g of CO2 a kWh, of which no hours depend


class AsPublished(NamedTuple):
    """A named run: its GPU hours as they were published, and as they are planned."""

    published: float
    planned: float
    found: Found


@cache
def named_runs() -> dict[str, dict[str, Any]]:
    """Return the runs of the table."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def sizes_of(said: Mapping[str, Any]) -> Model:
    """Return the model of a run. Raise PlanError if the planner has no such model."""
    if "model" in said:
        return model(said["model"])
    sizes = said["sizes"]
    unknown = sorted(sizes.keys() - ranges("model").keys())
    if unknown:
        raise PlanError(f"a model has no {unknown[0]} here")
    return Model(**sizes)


def machine_of(said: Mapping[str, Any]) -> Machine:
    """Return where a run was computed."""
    if "cluster" in said:
        return machine(said["cluster"])
    own = said["machine"]
    device = Device.named(own["device"])
    return Machine(
        device.name,
        device,
        own["gpus"],
        own["node"],
        own["across"],
        price=0.0,
        host=own.get("host", 0),
    )


def start_of(said: Mapping[str, Any], software: Software) -> Setup:
    """Return a run without its layout."""
    where, sizes = machine_of(said), sizes_of(said)
    start = Setup(
        sizes,
        where,
        said["sequence"],
        said["batch"],
        software=software,
        precision="fp8" if said.get("fp8") else "bf16",
    )
    return replace(start, fused_loss=True, hidden_tensor=sizes.parallel)


def newest(where: Machine) -> Software:
    """Return the newest software that such devices have."""
    generation = where.device.generation
    return Software.named(NEWEST.get(generation, "megatron-core-2026"))


def as_told(said: Mapping[str, Any]) -> AsPublished:
    """Return a run in the layout and with the software of its time.

    Raises
    ------
    PlanError
        If its model, machine or layout is not known here.
    """
    software = Software.named(said["software"])
    start = start_of(said, software)
    layout = said.get("layout", {})
    known = {each.name for each in fields(Setup)}
    unknown = sorted(layout.keys() - known)
    if unknown:
        raise PlanError(f"a layout has no {unknown[0]} here")
    if said.get("searched"):
        return planned(said, best(start, layout))
    run = replace(start, **layout)
    seconds = step(run, exact=True)
    return planned(said, Found(run, seconds, bytes_held(run)))


def today(said: Mapping[str, Any]) -> AsPublished:
    """Return the same run in the best layout, with the newest software."""
    where = machine_of(said)
    start = start_of(said, newest(where))
    return planned(said, best(start, {}))


def best(start: Setup, layout: Mapping[str, Any]) -> Found:
    """Return the best layout that has these fields."""
    answer = search(start, layout, RESERVE)
    return answer.groups()[0][0]


def planned(said: Mapping[str, Any], found: Found) -> AsPublished:
    """Return a layout with its hours beside the published ones."""
    return AsPublished(published_hours(said, found), hours(said, found), found)


def hours(said: Mapping[str, Any], found: Found) -> float:
    """Return the planned GPU hours, with failures if the published ones count them."""
    if "gpu_hours" in said:
        return cost(found, said["tokens"], None, GRID)["gpu_hours"]
    return hours_of_steps(said, found.run, found.seconds)


def published_hours(said: Mapping[str, Any], found: Found) -> float:
    """Return the published GPU hours: of the run, or of its steps alone."""
    if "gpu_hours" in said:
        return float(said["gpu_hours"])
    return hours_of_steps(said, found.run, said["step_seconds"])


def hours_of_steps(said: Mapping[str, Any], run: Setup, seconds: float) -> float:
    """Return the GPU hours of all steps, of so many seconds each."""
    steps: float = said["tokens"] / (run.batch * run.sequence)
    return steps * seconds * run.machine.total / HOUR


# ---------------------------------------------------------------- what answers say of it


@cache
def stored() -> dict[str, Any]:
    """Return the table as it was written."""
    return dict(json.loads(AS_PUBLISHED.read_text(encoding="utf-8")))


def shares(of: str) -> list[float]:
    """Return planned GPU hours as shares of those that whole runs really took, in order.

    `of` is "planned", as they were published, or "today".
    """
    found = []
    for name, each in stored().items():
        if of in each and "gpu_hours" in named_runs()[name]:
            found.append(each[of] / each["published"])
    return sorted(found)
