"""Every layout whose numbers fit together, and why the others do not.

for tp, pp, cp; for microbatch, ep; for order; for schedule, chunks, cut; for ZeRO, recomputing, hsdp
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from minidist.parallel.pipeline.schedules import CHUNKED
from minidist.plan.run import Setup
from minidist.plan.search.choices import LONG, divisors, options
from minidist.plan.search.cuts import cuts
from minidist.plan.stages import SPLIT

# a pipeline with these reduces gradients in the backward of each microbatch
REDUCING = ("gpipe", "1f1b")
UNEVEN = "share a step's sequences out unevenly"


Ladder = Iterable[Setup]
"""Layouts that differ in what saves memory: each is slower than the one before it, and smaller.

ZeRO 2, which reduces the gradients of each microbatch, has a rung behind each of ZeRO 1; it may be
slower than later ones.
"""


def candidates(start: Setup, fixed: Mapping[str, Any], refused: Counter[str]) -> Iterator[Ladder]:
    """Yield every layout whose numbers fit together; count the others by reason."""
    for base in axes(start, fixed, refused):
        for run in shared_out(base, fixed, refused):
            for same in scheduled(run, fixed, refused):
                yield from ladders(same, fixed, refused)


def axes(start: Setup, fixed: Mapping[str, Any], refused: Counter[str]) -> Iterator[Setup]:
    """Yield a layout for all sizes of axes that fit the machine and the model."""
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
        yield replace(start, tp=tp, pp=pp, dp=dp, cp=cp, sp=tp > 1)


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


def ladders(same: list[Setup], fixed: Mapping[str, Any], refused: Counter[str]) -> Iterator[Ladder]:
    """Yield a layout without ZeRO, with ZeRO 1 and 2, and with ZeRO 3 in groups of ranks, each with
    its ways to recompute, and with each cut of its layers.
    """
    base = same[0]
    again = recomputing(base, fixed)
    offered = [each for each in options(fixed, "zero") if zero_pays(base, each, fixed)]
    if 2 in offered and base.pp > 1 and base.schedule not in REDUCING:
        offered.remove(2)
        if "zero" in fixed:
            refused["reduce each microbatch's gradients, which only 1f1b and gpipe do"] += 1

    def rungs(*zeros: int, group: int = 0) -> Iterator[Setup]:
        for policy, cut, zero in product(again, same, zeros):
            # ZeRO 2 never has whole gradients
            reducing = replace(cut.software, reduces_each=True) if zero == 2 else cut.software
            yield replace(
                cut,
                zero=zero,
                hsdp=group,
                recompute=policy,
                software=reducing,
                offload=zero > 0 and fixed["offload"],
            )

    if 0 in offered:
        yield rungs(0)
    if together := [zero for zero in offered if zero in (1, 2)]:
        yield rungs(*together)
    if 3 in offered:
        for group in groups(base, fixed):
            yield rungs(3, group=group)


def zero_pays(run: Setup, zero: int, fixed: Mapping[str, Any]) -> bool:
    """Tell whether a stage of ZeRO makes a layout another one, and no worse one."""
    if zero and run.dp * run.cp == 1:
        return False  # nobody to share with: the same as without ZeRO
    if zero == 3 and run.pp > 1:
        return False  # it would gather the parameters of each microbatch
    if zero < 3 and fixed.get("hsdp"):
        return False  # only ZeRO 3 shards in groups
    return zero > 0 or not fixed["offload"]  # what is not sharded is not offloaded


def recomputing(run: Setup, fixed: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ways to recompute; a kernel that keeps no scores has nothing to be selective of."""
    offered = options(fixed, "recompute")
    if "recompute" in fixed or run.software.kernel == "unfused":
        return offered
    return tuple(each for each in offered if each != "selective")


def scheduled(
    base: Setup, fixed: Mapping[str, Any], refused: Counter[str]
) -> Iterator[list[Setup]]:
    """Yield a layout with each schedule that fits its microbatches, and with each cut for it."""
    for schedule, chunks in schedules(base, fixed):
        run = replace(base, schedule=schedule, chunks=chunks)
        if reason := misfit_of_schedule(run):
            refused[reason] += 1
        else:
            yield cuts(run)


def schedules(run: Setup, fixed: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return each schedule with the chunks that go with it; without a pipeline there is only one."""
    if run.pp == 1:
        return [("1f1b", 1)]
    names = options(fixed, "schedule")
    found = []
    for name, chunks in product(names, options(fixed, "chunks")):
        if (chunks > 1) == (name in CHUNKED):
            found.append((name, chunks))
    return found


def misfit_of_schedule(run: Setup) -> str:
    """Return why a schedule does not fit the layers or the microbatches; nothing if it does."""
    pp, m, stages = run.pp, run.microbatches, run.pp * run.stages_a_rank
    if stages > run.model.layers + 2:
        return "have more stages than layers"
    if run.schedule in CHUNKED and m % pp:
        return "have microbatches that stages do not divide, which interleaved ones have to"
    if pp > 1 and m < pp:
        return "have fewer microbatches than stages"
    if run.machine.slower and stages > pp:
        return "have several stages on each GPU of two sites"
    if pp > 1 and run.bits8 and run.schedule in SPLIT:
        return "put weight gradients off, which products of 8 bits do not allow"
    return ""


def groups(run: Setup, fixed: Mapping[str, Any]) -> list[int]:
    """Return how many ranks ZeRO 3 may shard over: all (0), a part of a node, or whole nodes."""
    ranks = run.dp * run.cp
    node = max(1, run.machine.node // run.tp)
    parts = [each for each in divisors(ranks)[1:-1] if each % node == 0 or node % each == 0]
    found = [0, *parts] if run.ep == 1 else [0]
    return [each for each in found if each == fixed.get("hsdp", each)]


def misfit(start: Setup, tp: int, pp: int, cp: int, fixed: Mapping[str, Any]) -> str:
    """Return why the axes do not fit the machine or the model; nothing if they do."""
    model, machine = start.model, start.machine
    dp, remainder = divmod(machine.total, tp * pp * cp)
    if remainder or fixed.get("dp", dp) != dp:
        return "do not divide the GPUs"
    if tp > machine.node and "tp" not in fixed:
        return "put tensor parallelism across nodes"
    keys_are_cut = model.kv % tp and tp % model.kv
    if model.heads % tp or keys_are_cut:
        return "cut heads"
    if cp > 1 and start.sequence < LONG and "cp" not in fixed:
        return f"cut sequences of fewer than {LONG:,} tokens"
    if start.sequence % (2 * cp * tp):
        return "cut sequences unevenly"
    if machine.slower:
        apart = machine.gpus * pp % machine.total == 0
        return "" if apart else "have a stage on two sites"
    return ""
