"""Every layout whose numbers fit together, and why the others do not.

for tp, pp, cp; for microbatch, ep; for order; for schedule, chunks, cut; for ZeRO, recomputing, hsdp
"""

from collections import Counter
from collections.abc import Iterator, Mapping
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
            for ordered in orders(run, fixed):
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
    pairs = list(cut_schedules(base, fixed, refused))
    for zero in options(fixed, "zero"):
        if not zero_pays(base, zero, fixed["offload"]):
            continue
        reducing = replace(base.software, reduces_each=True) if zero == 2 else base.software
        for recompute, run in product(recomputing(base, fixed), pairs):
            if zero > 1 and run.pp > 1 and run.schedule not in REDUCING:
                refused["reduce each microbatch's gradients, which only 1f1b and gpipe do"] += 1
                continue
            found = replace(
                run, zero=zero, recompute=recompute, software=reducing, offload=fixed["offload"]
            )
            yield from sharded_in_groups(found, fixed) if zero == 3 else [found]


def zero_pays(run: Setup, zero: int, offload: bool) -> bool:
    """Tell whether a stage of ZeRO makes a layout another one, and no worse one."""
    if zero and run.dp * run.cp == 1:
        return False  # nobody to share with: the same as without ZeRO
    if zero == 3 and run.pp > 1:
        return False  # it would gather the parameters of each microbatch
    return zero > 0 or not offload  # what is not sharded is not offloaded


def recomputing(run: Setup, fixed: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ways to recompute; a kernel that keeps no scores has nothing to be selective of."""
    offered = options(fixed, "recompute")
    if "recompute" in fixed or run.software.kernel == "unfused":
        return offered
    return tuple(each for each in offered if each != "selective")


def cut_schedules(base: Setup, fixed: Mapping[str, Any], refused: Counter[str]) -> Iterator[Setup]:
    """Yield a layout with each schedule that fits its microbatches, and each cut of its layers."""
    for schedule, chunks in schedules(base, fixed):
        run = replace(base, schedule=schedule, chunks=chunks)
        if reason := misfit_of_schedule(run):
            refused[reason] += 1
        else:
            yield from cuts(run)


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


def sharded_in_groups(run: Setup, fixed: Mapping[str, Any]) -> Iterator[Setup]:
    """Yield the layout, and with groups of ranks that shard and replicate each other: a part of a
    node, or whole nodes.
    """
    if not fixed.get("hsdp"):
        yield run
    ranks = run.dp * run.cp
    node = max(1, run.machine.node // run.tp)
    for group in divisors(ranks)[1:-1]:
        asked = fixed.get("hsdp", group) == group
        if asked and run.ep == 1 and (group % node == 0 or node % group == 0):
            yield replace(run, hsdp=group)


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
