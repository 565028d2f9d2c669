"""Lesson 20, solved: `minidist/budget.py` for any number of parameters, and with chunks of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minidist import budget


@dataclass(frozen=True)
class Model:
    """As in the exercise."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    sequence: int


@dataclass(frozen=True)
class Machine:
    """As in the exercise."""

    gpus: int
    node: int
    peak: float
    reached: float
    memory: float
    reserved: float
    inside: float
    card: float
    price: float


@dataclass(frozen=True)
class Layout:
    """As in the exercise."""

    dp: int
    tp: int
    pp: int
    chunks: int = 1
    microbatch: int = 1
    sp: bool = False
    zero: int = 0
    recompute: bool = False


class Bill(NamedTuple):
    """As in the exercise."""

    days: float
    money: float
    mfu: float


def operations(model: Model) -> float:
    """Return the operations of a token, forward and backward."""
    return 6 * model.parameters + 12 * model.layers * model.sequence * model.hidden


def microbatches(layout: Layout, batch: int) -> int:
    """Return m, of each replica."""
    return batch // (layout.dp * layout.microbatch)


def ring(bytes: float, ranks: int, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce."""
    return budget.ring(ranks) * bytes / bandwidth


def bubble(p: int, m: float, v: int = 1) -> float:
    """Return the bubble as a share of the whole step; of the ideal time it is (p - 1)/(v m)."""
    return (p - 1) / (v * m + p - 1)


def in_flight(p: int, m: float, v: int = 1) -> float:
    """Return how many microbatches the first stage holds activations for."""
    return min(m, p + (p - 1) / v if v > 1 else p)


def bandwidth(machine: Machine, span: int, apart: int) -> float:
    """Return the bytes/s of a ring of ranks that lie so far `apart`, among `span` neighbouring
    ones.
    """
    inside, card = machine.inside * 1e9, machine.card * 1e9 / 8
    in_a_node = max(1, machine.node // apart)
    return inside if span <= machine.node else min(inside, in_a_node * card)


def step(model: Model, machine: Machine, layout: Layout, batch: int) -> dict[str, float]:
    """Say where the seconds go."""
    m, tokens = microbatches(layout, batch), layout.microbatch * model.sequence
    t, p, d = layout.tp, layout.pp, layout.dp
    computing = tokens * operations(model) / (t * p * machine.peak * machine.reached)
    recomputing = computing / 3 if layout.recompute else 0.0
    inside, across = bandwidth(machine, t, 1), bandwidth(machine, t * d, t)
    all_reduces = (6 if layout.recompute else 4) * model.layers / p
    tensor = all_reduces * ring(2 * tokens * model.hidden, t, inside)
    seconds = {"computing": m * computing, "recomputing": m * recomputing, "tensor": m * tensor}
    seconds["bubble"] = (p - 1) / (layout.chunks * m) * sum(seconds.values())
    reducing = ring(2 * model.parameters / (t * p), d, across)
    seconds["data"] = max(0.0, reducing - 2 / 3 * computing - recomputing)
    return seconds


def bill(
    model: Model, machine: Machine, batch: int, seconds: float, tokens: float, recompute: bool
) -> Bill:
    """Say what a run costs."""
    of_step = batch * model.sequence
    days, money = budget.bill(seconds, tokens, of_step, machine.gpus, machine.price / machine.node)
    useful = of_step * operations(model)
    return Bill(days, money, useful / (seconds * machine.gpus * machine.peak))


def replicas(machine: Machine, tp: int, pp: int) -> int:
    """Divide the GPUs."""
    if machine.gpus % (tp * pp):
        raise ValueError(f"{machine.gpus} GPUs cannot be divided into replicas of {tp} x {pp}")
    return machine.gpus // (tp * pp)


def held(model: Model, layout: Layout, batch: int) -> dict[str, float]:
    """Say what a GPU holds."""
    t, p, d, m = layout.tp, layout.pp, layout.dp, microbatches(layout, batch)
    n = model.parameters / (t * p)
    x = model.sequence * layout.microbatch * model.hidden
    parts = t if layout.sp else 1
    layer = x * (10 / parts + 24 / t)
    kept = 2 * x / parts if layout.recompute else layer
    return {
        "parameters": 2 * n / (d if layout.zero >= 3 else 1),
        "gradients": (4 if m > 1 else 2) * n / (d if layout.zero >= 2 else 1),
        "optimizer": 12 * n / (d if layout.zero >= 1 else 1),
        "activations": in_flight(p, m, layout.chunks) * model.layers / p * kept + layer - kept,
    }


def fits(machine: Machine, bytes: Mapping[str, float]) -> bool:
    """Compare with the room."""
    return sum(bytes.values()) <= (machine.memory - machine.reserved) * 2**30


REASONS = ("", "gpus", "node", "heads", "layers", "batch", "stages", "memory")


def refusal(model: Model, machine: Machine, layout: Layout, batch: int) -> str:
    """Say why a layout is refused."""
    dp, tp, pp = layout.dp, layout.tp, layout.pp
    reasons = {
        "gpus": dp * tp * pp != machine.gpus,
        "node": tp > machine.node,
        "heads": model.heads % tp,
        "layers": model.layers % (pp * layout.chunks),
        "batch": batch % (dp * layout.microbatch),
        "stages": batch // (dp * layout.microbatch) < pp,
    }
    found = next((reason for reason, true in reasons.items() if true), "")
    return found or ("" if fits(machine, held(model, layout, batch)) else "memory")


def best(
    model: Model, machine: Machine, layouts: Sequence[Layout], batch: int
) -> tuple[int | None, list[str]]:
    """Memory first, then time."""
    refused = [refusal(model, machine, layout, batch) for layout in layouts]

    def cost(i: int) -> tuple[float, float]:
        seconds, bytes = step(model, machine, layouts[i], batch), held(model, layouts[i], batch)
        return sum(seconds.values()), sum(bytes.values())

    return min(
        (i for i, reason in enumerate(refused) if not reason), key=cost, default=None
    ), refused


REMEDIES = ("nothing", "microbatches", "chunks", "zero bubble", "stages or links")
LONG, FAR = 0.15, 1.5


class Diagnosis(NamedTuple):
    """As in the exercise."""

    measured: float
    formula: float
    remedy: str
    to: int


def diagnose(model: Model, layout: Layout, batch: int, seconds: float, idle: float) -> Diagnosis:
    """Compare with the formula, and look for what helps."""
    p, v, part = layout.pp, layout.chunks, batch // layout.dp
    m = part // layout.microbatch
    measured, formula = idle / seconds, bubble(p, m, v)
    remedy, to = "zero bubble", 0
    more = [k for k in range(m + 1, part + 1) if part % k == 0 and bubble(p, k, v) <= LONG]
    finer = [
        k
        for k in range(v + 1, model.layers + 1)
        if model.layers % (p * k) == 0 and bubble(p, m, k) <= LONG
    ]
    if measured <= LONG:
        remedy = "nothing"
    elif formula <= LONG or measured > FAR * formula:
        remedy = "stages or links"
    elif more:
        remedy, to = "microbatches", more[0]
    elif finer:
        remedy, to = "chunks", finer[0]
    return Diagnosis(measured, formula, remedy, to)


@dataclass(frozen=True)
class Plan:
    """As in the exercise."""

    gpus: int
    hours: float
    rented: float
    gpu_mtbf: float
    every: float
    kept: int
    shared: bool
    restart: float
    limit: bool
    by_rank: bool
    noticed: float


FAILURES = ("dead node", "torn checkpoint", "hang", "slow rank", "bad loss", "late end")


def undefended(plan: Plan) -> set[str]:
    """Look for what is missing."""
    safe = plan.every > 0 and plan.shared
    failures = plan.hours * plan.gpus / plan.gpu_mtbf
    lost = (plan.every if safe else plan.hours) / 2
    missing = {
        "dead node": not safe,
        "torn checkpoint": plan.every == 0 or plan.kept < 2,
        "hang": not plan.limit,
        "slow rank": not plan.by_rank,
        "bad loss": plan.noticed == 0 or (plan.kept - 1) * plan.every < plan.noticed,
        "late end": plan.hours + failures * (lost + plan.restart) > plan.rented,
    }
    return {failure for failure, true in missing.items() if true}
