"""Which layout? Try all of them, one after the other: refuse what does not fit, and keep the
fastest.

    for tp, pp, cp, ep; for microbatch; for ZeRO, shards, recomputing; for schedule, chunks:
        refuse what divides nothing, or holds more than a GPU has     (memory.py)
        time the rest in closed form                                  (step.py)
    run the plans of the best on a clock, and sort those again

Some ten thousand layouts at a fraction of a millisecond: nothing cleverer is needed. (Alpa and
Galvatron, which search graphs of operators, need solvers.)
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

from minidist.launch.parser import nearest
from minidist.mesh import AXES
from minidist.parallel.pipeline.schedules import CHUNKED
from minidist.plan.device import PlanError
from minidist.plan.memory import GB, bytes_held
from minidist.plan.parts.layer import Seconds, passes
from minidist.plan.run import Setup
from minidist.plan.step import SCHEDULES, step

CHOICES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4, 8, 16),
    "cp": (1, 2, 4, 8, 16),
    "ep": (1, 2, 4, 8, 16, 32, 64),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "full"),
    "microbatch": (1, 2, 4, 8),
    "chunks": (1, 2, 3, 4, 5, 6, 8),
    "schedule": ("1f1b", "interleaved", "zb-h1"),
    "offload": (False, True),
    "order": (AXES, ("pp", "dp", "cp", "tp")),  # stages near each other, or replicas
}
# if fixed
ALSO = {
    "recompute": ("none", "selective", "full"),
    "schedule": SCHEDULES,
    "order": (*permutations(AXES),),
}
LONG = 16384  # tokens of a sequence from which context parallelism is looked at
FINALISTS = 24
VARIANTS = 4  # at most so many finalists have equal axes and shards
# of a GPU's memory: what an allocator cannot use, and a batch that is longer than others
RESERVE = 0.05
UNEVEN = "share a step's sequences out unevenly"
NEAREST = 3  # batches that divide are tried where none does: each takes a search


@dataclass(frozen=True)
class Found:
    """A layout that fits: where its step's seconds go, and the bytes of its fullest GPU by
    category.
    """

    run: Setup
    step: Seconds
    bytes: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.step.values())


@dataclass(frozen=True)
class Answer:
    """The layouts that fit, best first, and how many were refused for each reason.

    The first were timed on a clock: a few of each group, so that layouts which differ are among
    them.
    """

    found: tuple[Found, ...]
    refused: Mapping[str, int]

    def groups(self) -> list[list[Found]]:
        """Return the layouts that have equal axes and shards as one list, best first.

        The best list first.
        """
        groups: dict[tuple[int, ...], list[Found]] = {}
        for each in self.found:
            groups.setdefault(shares(each.run), []).append(each)
        return list(groups.values())


def search(start: Setup, fixed: Mapping[str, Any] | None = None, reserve: float = 0.0) -> Answer:
    """Return the layouts of a run on its machine.

    Parameters
    ----------
    fixed : mapping, optional
        Fields of `Setup` that are not looked for.
    reserve : float
        The share of a GPU's memory that has to stay free; the command keeps `RESERVE`.

    Raises
    ------
    PlanError
        If a fixed field is unknown, or nothing fits; the message says what came nearest.
    """
    fixed = dict(fixed or {})
    check_fixed(fixed)
    refused: Counter[str] = Counter()
    found, smallest = fitting(start, fixed, reserve, refused)
    if not found:
        raise PlanError(nothing_fits(start, fixed, reserve, +refused, smallest))
    found.sort(key=lambda each: each.seconds)
    first, rest = finalists(found)
    timed = [replace(each, step=step(each.run, exact=True)) for each in first]
    timed.sort(key=lambda each: each.seconds)
    return Answer((*timed, *rest), +refused)


def nothing_fits(
    start: Setup,
    fixed: Mapping[str, Any],
    reserve: float,
    refused: Counter[str],
    smallest: float,
) -> str:
    """Return the sentence that says why no layout fits, and what came nearest."""
    reasons = [f"{count:,} {reason}" for reason, count in refused.most_common(3)]
    near = ""
    if smallest < float("inf"):
        near = f"; the smallest holds {smallest / GB:,.0f} GB a GPU"
    near += nearest_batch(start, fixed, reserve, refused)
    machine = f"{start.machine.total:,} GPUs of {start.machine.name}"
    return f"no layout fits {machine}: {'; '.join(reasons)}{near}"


def fitting(
    start: Setup, fixed: Mapping[str, Any], reserve: float, refused: Counter[str]
) -> tuple[list[Found], float]:
    """Return the layouts that fit, timed in closed form, and the bytes of a GPU in the smallest of
    all.
    """
    memory = min(site.device.memory for site in start.machine.sites)
    room = memory * (1 - reserve)
    free = f", of which {reserve:.0%} stay free" if reserve else ""
    too_much = f"hold more than the {memory / GB:.0f} GB of a GPU{free}"
    smallest = float("inf")
    found: list[Found] = []
    for offload in options(fixed, "offload"):  # to the host's memory only if nothing fits without
        if found:
            break
        for run in candidates(start, {**fixed, "offload": offload}, refused):
            bytes = bytes_held(run)
            total = sum(bytes.values())
            smallest = min(smallest, total)
            if total <= room:
                found.append(Found(run, step(run), bytes))
            else:
                refused[too_much] += 1
    return found, smallest


def finalists(found: Iterable[Found]) -> tuple[list[Found], list[Found]]:
    """Return the layouts, which are sorted, in two parts: those that are worth a clock, and the
    others.
    """
    first: list[Found] = []
    rest: list[Found] = []
    alike: Counter[tuple[int, ...]] = Counter()
    for each in found:
        group = shares(each.run)
        alike[group] += 1
        if alike[group] <= VARIANTS and len(first) < FINALISTS:
            first.append(each)
        else:
            rest.append(each)
    return first, rest


def shares(run: Setup) -> tuple[int, ...]:
    """Return what makes two layouts differ: how many ranks share what.

    The rest, such as an order, are variants.
    """
    return run.tp, run.pp, run.cp, run.ep, run.dp, run.zero, run.hsdp


def nearest_batch(
    start: Setup, fixed: Mapping[str, Any], reserve: float, refused: Mapping[str, int]
) -> str:
    """Name the nearest batch for which a layout fits, if layouts were refused for the batch."""
    if UNEVEN not in refused:
        return ""
    # Replicas are a divisor of the GPUs, and a batch is a multiple of the replicas.
    near = set()
    for replicas in divisors(start.machine.total):
        below = start.batch // replicas
        near |= {max(1, below) * replicas, (below + 1) * replicas}
    tried = 0
    for batch in sorted(near, key=lambda each: abs(each - start.batch)):
        run = replace(start, batch=batch)
        possible = candidates(run, {**fixed, "offload": False}, Counter())
        if next(possible, None) is None:
            continue  # it divides nothing, either
        if fitting(run, fixed, reserve, Counter())[0]:
            return (
                f"; the nearest batch that fits is {batch:,} sequences: --batch "
                f"{batch * start.sequence}"
            )
        tried += 1
        if tried == NEAREST:
            break
    return ""


def check_fixed(fixed: Mapping[str, Any]) -> None:
    """Refuse fields that are not looked for, and values that they cannot have."""
    known = CHOICES | {"pp": (1,), "dp": (1,)} | ALSO
    for name, value in fixed.items():
        if name not in known:
            choose = f"{meant} Or choose" if (meant := nearest(name, known)) else "choose"
            raise PlanError(f"{name} cannot be fixed: {choose} among {', '.join(known)}")
        counts = name in ("tp", "pp", "dp", "cp", "ep", "microbatch", "chunks")
        # True is not 1
        alike = [each for each in known[name] if type(each) is type(value) and each == value]
        if not (type(value) is int and value >= 1 if counts else alike):
            can = (
                "a whole number, at least 1"
                if counts
                else f"one of {', '.join(map(str, known[name]))}"
            )
            raise PlanError(f"{name}={value} cannot be: it is {can}")


def candidates(start: Setup, fixed: Mapping[str, Any], refused: Counter[str]) -> Iterator[Setup]:
    """Yield every layout whose numbers fit together; count the others by reason."""
    total = start.machine.total
    stages = divisors(total, most=start.model.layers)
    if "pp" in fixed:
        stages = [fixed["pp"]]
    for tp, pp, cp in product(options(fixed, "tp"), stages, options(fixed, "cp")):
        reason = misfit(start, tp, pp, cp, fixed)
        if reason:
            refused[reason] += 1
            continue
        dp = total // (tp * pp * cp)
        base = replace(start, tp=tp, pp=pp, dp=dp, cp=cp, sp=tp > 1)
        for run in shared_out(base, fixed, refused):
            for ordered in orders(replace(run, cut=cut(run)), fixed):
                yield from policies(ordered, fixed, refused)


def shared_out(base: Setup, fixed: Mapping[str, Any], refused: Counter[str]) -> Iterator[Setup]:
    """Yield a layout with each microbatch, and each number of ranks that share experts."""
    experts = base.model.experts
    for microbatch, ep in product(options(fixed, "microbatch"), options(fixed, "ep")):
        if base.batch % (base.dp * microbatch):
            refused[UNEVEN] += 1
        elif ep > 1 and not experts:
            if "ep" in fixed:
                refused["share out experts, of which the model has none"] += 1
        elif experts % (ep * base.tp) or base.dp * base.cp % ep:
            refused["share experts out unevenly"] += 1
        else:
            yield replace(base, ep=ep, microbatch=microbatch)


def orders(run: Setup, fixed: Mapping[str, Any]) -> list[Setup]:
    """Return a layout with each order of its axes; of orders with the same links only the first."""
    found = {}
    for order in reversed(options(fixed, "order")):
        ordered = replace(run, order=order)
        links = ordered.group("pp"), ordered.group("dp")
        found[links] = ordered  # in the place of a later order, if that has the same links
    return list(found.values())


def policies(base: Setup, fixed: Mapping[str, Any], refused: Counter[str]) -> Iterator[Setup]:
    """Yield a layout with each ZeRO, schedule and way to save memory that goes with it."""
    for zero in options(fixed, "zero"):
        if not zero_pays(base, zero, fixed["offload"]):
            continue
        run = replace(base, zero=zero, offload=fixed["offload"])
        for recompute, (schedule, chunks) in product(
            options(fixed, "recompute"), schedules(base, fixed)
        ):
            if reason := misfit_of_schedule(base, schedule, chunks):
                refused[reason] += 1
                continue
            found = replace(run, recompute=recompute, schedule=schedule, chunks=chunks)
            yield found
            if zero == 3:
                yield from sharded_in_nodes(found)


def zero_pays(run: Setup, zero: int, offload: bool) -> bool:
    """Tell whether a stage of ZeRO makes a layout another one, and no worse one."""
    if zero and run.dp * run.cp == 1:
        return False  # nobody to share with: the same as without ZeRO
    if zero == 2 and run.reductions > 1:
        return False  # it holds whole gradients, as ZeRO 1 does
    if zero > 1 and run.pp > 1:
        return False  # it would send the gradients of each microbatch
    return zero > 0 or not offload  # what is not sharded is not offloaded


def schedules(run: Setup, fixed: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return each schedule with the chunks that go with it; without a pipeline only the first."""
    names = options(fixed, "schedule")
    if run.pp == 1:
        names = names[:1]
    found = []
    for name, chunks in product(names, options(fixed, "chunks")):
        if (chunks > 1) == (name in CHUNKED):
            found.append((name, chunks))
    return found


def misfit_of_schedule(run: Setup, schedule: str, chunks: int) -> str:
    """Return why a schedule does not fit the layers or the microbatches; nothing if it does."""
    pp, m = run.pp, run.microbatches
    if chunks > 1 and (run.model.layers % (pp * chunks) or m % pp or run.cut):
        return "cut layers or microbatches into uneven chunks"
    if pp > 1 and m < pp:
        return "have fewer microbatches than stages"
    if pp > 1 and run.bits8 and schedule.startswith("zb"):
        return "put weight gradients off, which products of 8 bits do not allow"
    return ""


def sharded_in_nodes(run: Setup) -> Iterator[Setup]:
    """Yield the layout whose nodes shard, and replicate each other, as the package has it."""
    ranks = run.dp * run.cp
    node = max(1, run.machine.node // run.tp)
    if 1 < node < ranks and ranks % node == 0 and run.ep == 1:
        yield replace(run, hsdp=node)


def options(fixed: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """Return what a field may be."""
    return (fixed[name],) if name in fixed else CHOICES[name]


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number, in order, at most `most`."""
    last = number if most is None else min(number, most)
    return [each for each in range(1, last + 1) if number % each == 0]


def misfit(start: Setup, tp: int, pp: int, cp: int, fixed: Mapping[str, Any]) -> str:
    """Return why the axes do not fit the machine or the model; nothing if they do."""
    model, machine = start.model, start.machine
    dp, remainder = divmod(machine.total, tp * pp * cp)
    if remainder or fixed.get("dp", dp) != dp:
        return "do not divide the GPUs"
    if tp > machine.node and "tp" not in fixed:
        return "put tensor parallelism across nodes"
    if model.heads % tp or (model.kv % tp and tp % model.kv):
        return "cut heads"
    if cp > 1 and start.sequence < LONG and "cp" not in fixed:
        return f"cut sequences of fewer than {LONG:,} tokens"
    if start.sequence % (2 * cp * tp):
        return "cut sequences unevenly"
    if machine.slower:
        return "have a stage on two sites" if machine.gpus * pp % machine.total else ""
    # embedding and head may count as a layer each
    if model.layers % pp and (model.layers + 2) % pp:
        return "cut layers unevenly"
    return ""


def cut(run: Setup) -> tuple[int, ...]:
    """Return the layers of each stage where two sites have devices of different speed.

    Each layer goes to the stage that would be done with it first.
    """
    if not run.machine.slower:
        return ()
    seconds = []
    for stage in range(run.pp):
        forward, backward = passes(replace(run, machine=run.site(stage)))
        seconds.append(forward.seconds + backward.seconds)
    counts = [0] * run.pp
    for _ in range(run.model.layers):
        done = [(count + 1) * each for count, each in zip(counts, seconds, strict=True)]
        counts[done.index(min(done))] += 1
    return tuple(counts)
