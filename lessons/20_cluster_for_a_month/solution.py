"""Lesson 20, solved: the planner's plain page. Read it in `minidist/plan/plain.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from minidist.plan import plain


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


def asked(model: Model, layout: Layout, batch: int) -> tuple[Any, ...]:
    """Return what the plain page is asked with: sizes, m, b, t, p, d."""
    sizes = (model.parameters, model.layers, model.hidden, model.sequence)
    each = batch // (layout.dp * layout.microbatch)
    return sizes, each, layout.microbatch, layout.tp, layout.pp, layout.dp


def bandwidth(machine: Machine, span: int, apart: int) -> float:
    """Return the bytes/s of a ring of ranks that lie so far `apart`, among `span` neighbouring
    ones.
    """
    inside, card = machine.inside * 1e9, machine.card * 1e9 / 8
    in_a_node = max(1, machine.node // apart)
    return inside if span <= machine.node else min(inside, in_a_node * card)


def step(model: Model, machine: Machine, layout: Layout, batch: int) -> dict[str, float]:
    """Say where the seconds go."""
    span = layout.tp * layout.dp
    along = {
        "inside": bandwidth(machine, layout.tp, 1),
        "across": bandwidth(machine, span, layout.tp),
    }
    rate = machine.peak * machine.reached
    return plain.step(
        *asked(model, layout, batch),
        rate=rate,
        v=layout.chunks,
        recompute=layout.recompute,
        **along,
    )


def bill(
    model: Model, machine: Machine, batch: int, seconds: float, tokens: float, recompute: bool
) -> Bill:
    """Say what a run costs."""
    of_step = batch * model.sequence
    days, money = plain.bill(seconds, tokens, of_step, machine.gpus, machine.price / machine.node)
    useful = of_step * plain.operations(
        model.parameters, model.layers, model.hidden, model.sequence
    )
    return Bill(days, money, useful / (seconds * machine.gpus * machine.peak))


def replicas(machine: Machine, tp: int, pp: int) -> int:
    """Divide the GPUs."""
    if machine.gpus % (tp * pp):
        raise ValueError(f"{machine.gpus} GPUs cannot be divided into replicas of {tp} x {pp}")
    return machine.gpus // (tp * pp)


def held(model: Model, layout: Layout, batch: int) -> dict[str, float]:
    """Say what a GPU holds."""
    how = {"v": layout.chunks, "zero": layout.zero, "sp": layout.sp, "recompute": layout.recompute}
    found = plain.bytes_held(*asked(model, layout, batch), **how)
    several = batch > layout.dp * layout.microbatch
    return found | {"gradients": (2 if several else 1) * found["gradients"]}


def fits(machine: Machine, bytes: Mapping[str, float]) -> bool:
    """Compare with the room."""
    return plain.fits(dict(bytes), machine.memory, machine.reserved)


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
    measured, formula = idle / seconds, plain.bubble(p, m, v, of_step=True)
    remedy, to = "zero bubble", 0
    more = [
        k
        for k in range(m + 1, part + 1)
        if part % k == 0 and plain.bubble(p, k, v, of_step=True) <= LONG
    ]
    finer = [
        k
        for k in range(v + 1, model.layers + 1)
        if model.layers % (p * k) == 0 and plain.bubble(p, m, k, of_step=True) <= LONG
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
