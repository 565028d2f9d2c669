"""Lesson 20, an honest answer: a plan by hand, from the handout alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import minidist

# ---------------------------------------------------------------- given: do not change these


@dataclass(frozen=True)
class Model:
    """What is trained."""

    parameters: float  # N, of the whole model
    layers: int  # L
    hidden: int  # h, channels
    heads: int  # of attention, in each layer
    sequence: int  # s, tokens of a sequence


@dataclass(frozen=True)
class Machine:
    """What is rented. Mind the units: they are those in which each number is usually given."""

    gpus: int  # all together
    node: int  # GPUs of a node
    peak: float  # FLOP/s of a GPU in 16 bits, from its data sheet
    reached: float  # the share of `peak` that large products reach
    memory: float  # GiB of a GPU (2^30 bytes), as nvidia-smi shows them
    reserved: float  # GiB of it that the driver, NCCL and fragmentation take
    inside: float  # GB/s (10^9 bytes a second): what a ring reaches inside a node
    card: float  # Gb/s (10^9 bits a second): the network card that each GPU has
    price: float  # $ an hour for a whole node


@dataclass(frozen=True)
class Layout:
    """How the model is spread."""

    dp: int  # replicas
    tp: int  # ranks that share each layer
    pp: int  # stages of the pipeline
    chunks: int = 1  # v, parts of each stage: 1 is 1F1B, more is interleaved 1F1B
    microbatch: int = 1  # sequences of a microbatch
    sp: bool = False  # sequence parallelism, over the tp ranks
    zero: int = 0  # 1: the optimizer state is sharded over the dp ranks (ZeRO-1); 0: it is not
    recompute: bool = False  # every layer is computed again in backward


class Bill(NamedTuple):
    """What a run costs, and how well it uses what is paid."""

    days: float
    money: float
    mfu: float


# ---------------------------------------------------------------- what the tasks share


def per_token(model: Model) -> float:
    """Return the operations of a token."""
    return 6 * model.parameters + 12 * model.layers * model.sequence * model.hidden


def link(machine: Machine, neighbours: int, stride: int) -> float:
    """Return bytes a second of a group of every `stride`-th of so many neighbouring ranks."""
    if neighbours <= machine.node:
        return machine.inside * 1e9
    cards = machine.node // stride if stride < machine.node else 1
    return min(cards * machine.card / 8, machine.inside) * 1e9


def around(bytes: float, ranks: int, bandwidth: float) -> float:
    """Return the seconds of an all-reduce as a ring."""
    return 2 * (ranks - 1) / ranks * bytes / bandwidth


def why_not(model: Model, machine: Machine, layout: Layout, batch: int) -> str:
    """Return why a layout is refused."""
    if layout.dp * layout.tp * layout.pp != machine.gpus:
        return "gpus"
    if layout.tp > machine.node:
        return "node"
    if model.heads % layout.tp:
        return "heads"
    if model.layers % (layout.pp * layout.chunks):
        return "layers"
    if batch % layout.dp or batch // layout.dp % layout.microbatch:
        return "batch"
    if batch // layout.dp // layout.microbatch < layout.pp:
        return "stages"
    return "" if fits(machine, held(model, layout, batch)) else "memory"


# ---------------------------------------------------------------- task 1: time and money


def step(model: Model, machine: Machine, layout: Layout, batch: int) -> dict[str, float]:
    """Task 1: return where the seconds of a step go."""
    b, tp, pp = layout.microbatch, layout.tp, layout.pp
    m = batch // layout.dp // b
    share = batch * model.sequence * per_token(model) / (layout.dp * tp * pp)
    computing = share / (machine.peak * machine.reached)
    recomputing = computing / 3 if layout.recompute else 0.0
    activation = 2 * b * model.sequence * model.hidden
    calls = m * model.layers / pp * (6 if layout.recompute else 4)
    tensor = calls * around(activation, tp, link(machine, tp, 1))
    bubble = (computing + recomputing + tensor) * (pp - 1) / (layout.chunks * m)
    network = link(machine, tp * layout.dp, tp)
    gradients = around(2 * model.parameters / (tp * pp), layout.dp, network)
    behind = (computing * 2 / 3 + recomputing) / m
    parts = {"computing": computing, "recomputing": recomputing, "tensor": tensor, "bubble": bubble}
    return parts | {"data": gradients - behind if gradients > behind else 0.0}


def bill(
    model: Model, machine: Machine, batch: int, seconds: float, tokens: float, recompute: bool
) -> Bill:
    """Task 1: return days, money and MFU of a run over `tokens` tokens, whose steps take `seconds`
    each.
    """
    of_step = batch * model.sequence
    hours = math.ceil(tokens / of_step) * seconds / 3600
    nodes = machine.gpus / machine.node
    mfu = of_step * per_token(model) / seconds / (machine.gpus * machine.peak)
    return Bill(days=hours / 24, money=hours * nodes * machine.price, mfu=mfu)


# ---------------------------------------------------------------- task 2: memory


def replicas(machine: Machine, tp: int, pp: int) -> int:
    """Task 2: return how many replicas there are if each has pp stages of tp GPUs, and all GPUs are
    used.
    """
    count, left = divmod(machine.gpus, tp * pp)
    if left:
        raise ValueError(f"{left} of {machine.gpus} GPUs are left over")
    return count


def held(model: Model, layout: Layout, batch: int) -> dict[str, float]:
    """Task 2: return the bytes of a GPU of the first stage."""
    mine = model.parameters / layout.tp / layout.pp
    adam = 12 * mine / (layout.dp if layout.zero == 1 else 1)
    m = batch // (layout.dp * layout.microbatch)
    under_way = layout.pp if layout.chunks == 1 else layout.pp + (layout.pp - 1) / layout.chunks
    under_way = min(under_way, m)
    sbh = model.sequence * layout.microbatch * model.hidden
    # what divides that which lies outside of tensor-parallel regions
    outside = layout.tp if layout.sp else 1
    whole = sbh * (10 / outside + 24 / layout.tp)
    entry = 2 * sbh / outside
    layers = model.layers / layout.pp
    activations = layers * under_way * whole
    if layout.recompute:
        activations = layers * under_way * entry + whole - entry
    gradients = mine * (2 if m == 1 else 4)
    return {
        "parameters": 2 * mine,
        "gradients": gradients,
        "optimizer": adam,
        "activations": activations,
    }


def fits(machine: Machine, bytes: Mapping[str, float]) -> bool:
    """Task 2: tell whether a GPU has room for `bytes` (by category, as `held` returns them) beside
    what is reserved.
    """
    free = (machine.memory - machine.reserved) * 1024**3
    return sum(bytes.values()) <= free


# ---------------------------------------------------------------- task 3: the best of many layouts

REASONS = ("", "gpus", "node", "heads", "layers", "batch", "stages", "memory")


def best(
    model: Model, machine: Machine, layouts: Sequence[Layout], batch: int
) -> tuple[int | None, list[str]]:
    """Task 3: return the number of the best layout, counted from 0, and for each layout why it is
    refused.
    """
    refused, left = [], []
    for number, layout in enumerate(layouts):
        reason = why_not(model, machine, layout, batch)
        refused.append(reason)
        if not reason:
            seconds = sum(step(model, machine, layout, batch).values())
            left.append((seconds, sum(held(model, layout, batch).values()), number))
    return (min(left)[2] if left else None), refused


# ---------------------------------------------------------------- task 4: a bubble, as measured

REMEDIES = ("nothing", "microbatches", "chunks", "zero bubble", "stages or links")


class Diagnosis(NamedTuple):
    """What is wrong with a pipeline: shares of the whole step, one of `REMEDIES`, and to how
    many.
    """

    measured: float
    formula: float
    remedy: str
    to: int


def diagnose(model: Model, layout: Layout, batch: int, seconds: float, idle: float) -> Diagnosis:
    """Task 4: say whether a pipeline idles too much, whose fault it is, and what helps."""
    p, v = layout.pp, layout.chunks
    sequences = batch // layout.dp
    m = sequences // layout.microbatch

    def share(m: int, v: int) -> float:
        return (p - 1) / (v * m + p - 1)

    measured, formula = idle / seconds, share(m, v)
    if measured <= 0.15:
        return Diagnosis(measured, formula, "nothing", 0)
    if formula <= 0.15 or measured > 1.5 * formula:
        return Diagnosis(measured, formula, "stages or links", 0)
    for size in range(layout.microbatch, 0, -1):  # smaller microbatches, so more of them
        if sequences % size == 0 and share(sequences // size, v) <= 0.15:
            return Diagnosis(measured, formula, "microbatches", sequences // size)
    for chunks in range(v + 1, model.layers // p + 1):
        if model.layers % (p * chunks) == 0 and share(m, chunks) <= 0.15:
            return Diagnosis(measured, formula, "chunks", chunks)
    return Diagnosis(measured, formula, "zero bubble", 0)


# ---------------------------------------------------------------- task 5: what the plan does not defend against


@dataclass(frozen=True)
class Plan:
    """How a run is looked after."""

    gpus: int
    hours: float  # that the steps take if nothing happens
    rented: float  # hours for which the cluster is rented
    gpu_mtbf: float  # hours between two failures of one GPU and what belongs to it, on average
    every: float  # hours between two checkpoints; 0: none are written
    kept: int  # how many of the last checkpoints are kept
    shared: bool  # they are on storage that outlives a node; False: on the nodes' own disks
    restart: float  # hours from a failure until the job computes again
    limit: bool  # a collective that waits for too long ends the job, which is then started again
    by_rank: bool  # somebody compares the ranks' own computing times
    noticed: float  # hours until somebody notices that the loss went wrong; 0: nobody looks


FAILURES = ("dead node", "torn checkpoint", "hang", "slow rank", "bad loss", "late end")


def undefended(plan: Plan) -> set[str]:
    """Task 5: return the failures that a plan does not defend against, a subset of `FAILURES`."""
    found = set()
    survives = plan.every != 0 and plan.shared
    if not survives:
        found.add("dead node")
    if plan.every == 0 or plan.kept == 1:
        found.add("torn checkpoint")
    if not plan.limit:
        found.add("hang")
    if not plan.by_rank:
        found.add("slow rank")
    if not plan.noticed or plan.noticed > (plan.kept - 1) * plan.every:
        found.add("bad loss")
    between = plan.gpu_mtbf / plan.gpus
    work = plan.every / 2 if survives else plan.hours / 2
    if plan.hours + plan.hours / between * (work + plan.restart) > plan.rented:
        found.add("late end")
    return found


# ---------------------------------------------------------------- try it

H100 = Machine(
    gpus=64,
    node=8,
    peak=989e12,
    reached=0.6,
    memory=79.6,
    reserved=7.6,
    inside=365,
    card=400,
    price=8 * 2.49,
)
LLAMA = Model(parameters=70.6e9, layers=80, hidden=8192, heads=64, sequence=4096)
TEAM = Layout(dp=8, tp=4, pp=2)
"""What a team proposes for 70 billion parameters on 64 H100."""


def main() -> None:
    """Try every task, and print what comes out."""
    comm = minidist.init()

    def task_1() -> str:
        parts = step(LLAMA, H100, TEAM, 1024)
        cost = bill(LLAMA, H100, 1024, sum(parts.values()), 1.4e12, False)
        return (
            f"{sum(parts.values()):.2f} s a step, {cost.days:.1f} days, {cost.money:,.0f} $, MFU "
            f"{cost.mfu:.1%}"
        )

    def task_2() -> str:
        bytes = held(LLAMA, TEAM, 1024)
        shown = ", ".join(f"{name} {each / 1e9:.1f} GB" for name, each in bytes.items())
        return (
            f"{replicas(H100, 4, 2)} replicas; {shown}: "
            f"{'it fits' if fits(H100, bytes) else 'it does not fit'}"
        )

    def task_3() -> str:
        some = [
            TEAM,
            Layout(8, 4, 2, zero=1),
            Layout(8, 4, 2, zero=1, sp=True),
            Layout(4, 4, 4, zero=1, sp=True),
        ]
        return str(best(LLAMA, H100, some, 1024))

    def task_4() -> str:
        return str(
            diagnose(LLAMA, Layout(dp=16, tp=1, pp=4, microbatch=8), 1024, seconds=10.0, idle=3.0)
        )

    def task_5() -> str:
        plan = Plan(64, 5500, 5600, 50_700, 12, 1, True, 0.5, limit=True, by_rank=False, noticed=6)
        return str(sorted(undefended(plan)))

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
