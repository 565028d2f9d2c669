"""Which layout? All of them, one after the other: first what does not fit is refused, then the
fastest are kept.

    for tp, pp, cp, ep; for microbatch; for ZeRO, shards, recomputing; for schedule, chunks:
        refuse what divides nothing, or holds more than a GPU has     (held.py)
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
from minidist.plan.device import PlanError
from minidist.plan.held import GB, held
from minidist.plan.run import Setup
from minidist.plan.step import SCHEDULES, Seconds, passes, step

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
    held: dict[str, float]

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
        """Return the layouts that have equal axes and shards as one list, best first; the best list
        first.
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
        near = (
            ""
            if smallest == float("inf")
            else f"; the smallest holds {smallest / GB:,.0f} GB a GPU"
        )
        near += nearest_batch(start, fixed, reserve, +refused)
        why = "; ".join(f"{count:,} {reason}" for reason, count in (+refused).most_common(3))
        raise PlanError(
            f"no layout fits {start.machine.total:,} GPUs of {start.machine.name}: {why}{near}"
        )
    found.sort(key=lambda each: each.seconds)
    first, rest = finalists(found)
    timed = [replace(each, step=step(each.run, exact=True)) for each in first]
    return Answer((*sorted(timed, key=lambda each: each.seconds), *rest), +refused)


def fitting(
    start: Setup, fixed: Mapping[str, Any], reserve: float, refused: Counter[str]
) -> tuple[list[Found], float]:
    """Return the layouts that fit, timed in closed form, and the bytes of a GPU in the smallest of
    all.
    """
    memory = min(site.device.memory for site in start.machine.sites)
    room, smallest = memory * (1 - reserve), float("inf")
    found: list[Found] = []
    for offload in options(fixed, "offload"):  # to the host's memory only if nothing fits without
        if found:
            break
        for run in candidates(start, {**fixed, "offload": offload}, refused):
            bytes = held(run)
            smallest = min(smallest, sum(bytes.values()))
            if sum(bytes.values()) <= room:
                found.append(Found(run, step(run), bytes))
            else:
                kept = f", of which {reserve:.0%} stay free" if reserve else ""
                refused[f"hold more than the {memory / GB:.0f} GB of a GPU{kept}"] += 1
    return found, smallest


def finalists(found: Iterable[Found]) -> tuple[list[Found], list[Found]]:
    """Part the layouts, which are sorted, into those that are worth a clock and the others."""
    first: list[Found] = []
    rest: list[Found] = []
    alike: Counter[tuple[int, ...]] = Counter()
    for each in found:
        group = shares(each.run)
        alike[group] += 1
        (first if alike[group] <= VARIANTS and len(first) < FINALISTS else rest).append(each)
    return first, rest


def shares(run: Setup) -> tuple[int, ...]:
    """Return what makes two layouts differ: how many ranks share what. The rest, such as an order,
    are variants.
    """
    return run.tp, run.pp, run.cp, run.ep, run.dp, run.zero, run.shard


def nearest_batch(
    start: Setup, fixed: Mapping[str, Any], reserve: float, refused: Mapping[str, int]
) -> str:
    """Name the nearest batch for which a layout fits, if layouts were refused for the batch."""
    if UNEVEN not in refused:
        return ""
    total = start.machine.total
    parts = {total // size for size in range(1, total + 1) if total % size == 0}
    near = {max(1, start.batch // part + more) * part for part in parts for more in (0, 1)}
    tried = 0
    for batch in sorted(near, key=lambda each: abs(each - start.batch)):
        run = replace(start, batch=batch)
        if next(candidates(run, {**fixed, "offload": False}, Counter()), None) is None:
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
    model, total = start.model, start.machine.total
    most = min(model.layers, total)
    stages = (
        [fixed["pp"]] if "pp" in fixed else [pp for pp in range(1, most + 1) if total % pp == 0]
    )
    for tp, pp, cp in product(options(fixed, "tp"), stages, options(fixed, "cp")):
        if reason := misfit(start, tp, pp, cp, fixed):
            refused[reason] += 1
            continue
        dp = total // (tp * pp * cp)
        for microbatch, ep in product(options(fixed, "microbatch"), options(fixed, "ep")):
            if start.batch % (dp * microbatch):
                refused[UNEVEN] += 1
            elif ep > 1 and not model.experts:
                if "ep" in fixed:
                    refused["share out experts, of which the model has none"] += 1
            elif model.experts % (ep * tp) or dp * cp % ep:
                refused["share experts out unevenly"] += 1
            else:
                run = replace(
                    start, tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, microbatch=microbatch, sp=tp > 1
                )
                run = replace(run, cut=cut(run))
                orders = [replace(run, order=order) for order in reversed(options(fixed, "order"))]
                for other in {
                    (each.group("pp"), each.group("dp")): each for each in orders
                }.values():
                    # of orders with the same links only the first
                    yield from policies(other, fixed, refused)


def policies(base: Setup, fixed: Mapping[str, Any], refused: Counter[str]) -> Iterator[Setup]:
    """Yield a layout with each ZeRO, schedule and way to save memory that goes with it."""
    ranks, pp, m, offload = base.dp * base.cp, base.pp, base.microbatches, fixed["offload"]
    names = ("zero", "recompute", "schedule", "chunks")
    for zero, recompute, schedule, chunks in product(*(options(fixed, name) for name in names)):
        twin = zero and (ranks == 1 or (zero == 2 and base.reductions > 1))
        if twin or (pp > 1 and zero > 1) or (offload and not zero):
            continue  # the same as another, or one that sends a microbatch's gradients each time
        if (chunks > 1) != (schedule == "interleaved") or (
            pp == 1 and schedule != options(fixed, "schedule")[0]
        ):
            continue
        if chunks > 1 and (base.model.layers % (pp * chunks) or m % pp or base.cut):
            refused["cut layers or microbatches into uneven chunks"] += 1
        elif pp > 1 and m < pp:
            refused["have fewer microbatches than stages"] += 1
        elif pp > 1 and base.bits8 and schedule.startswith("zb"):
            refused["put weight gradients off, which products of 8 bits do not allow"] += 1
        else:
            run = replace(
                base,
                zero=zero,
                recompute=recompute,
                offload=offload,
                schedule=schedule,
                chunks=chunks,
            )
            yield run
            node = max(1, base.machine.node // base.tp)
            # as the package has it
            if zero == 3 and 1 < node < ranks and ranks % node == 0 and base.ep == 1:
                yield replace(run, shard=node)


def options(fixed: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """Return what a field may be."""
    return (fixed[name],) if name in fixed else CHOICES[name]


def misfit(start: Setup, tp: int, pp: int, cp: int, fixed: Mapping[str, Any]) -> str:
    """Return why the axes do not fit the machine or the model; nothing if they do."""
    model, machine = start.model, start.machine
    sites = (
        (machine.gpus * pp % machine.total, pp % 2 and pp == 1) if machine.slower else (0, False)
    )
    reasons = {
        "do not divide the GPUs": machine.total % (tp * pp * cp)
        or fixed.get("dp", machine.total // (tp * pp * cp)) != machine.total // (tp * pp * cp),
        "put tensor parallelism across nodes": tp > machine.node and "tp" not in fixed,
        "cut heads": model.heads % tp or (model.kv % tp and tp % model.kv),
        f"cut sequences of fewer than {LONG:,} tokens": cp > 1
        and "cp" not in fixed
        and start.sequence < LONG,
        "cut sequences unevenly": start.sequence % (2 * cp * tp),
        "cut layers unevenly": not machine.slower and model.layers % pp and (model.layers + 2) % pp,
        "have a stage on two sites": any(sites),
    }
    return next((reason for reason, true in reasons.items() if true), "")


def cut(run: Setup) -> tuple[int, ...]:
    """Return the layers of each stage where two sites have devices of other speed: the next to who
    is done first.
    """
    if not run.machine.slower:
        return ()
    each = [
        sum(half.whole for half in passes(replace(run, machine=run.site(i)))) for i in range(run.pp)
    ]
    counts = [0] * run.pp
    for _ in range(run.model.layers):
        counts[min(range(run.pp), key=lambda i: (counts[i] + 1) * each[i])] += 1
    return tuple(counts)
