"""Every layout whose numbers fit together, and why the others do not.

for tp, pp, cp; for microbatch, ep; for order; for schedule, chunks, cut; for ZeRO, recomputing, hsdp
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from minidist.full.pipeline.schedules import CHUNKED
from minidist.plan.run import Setup
from minidist.plan.search.choices import LONG, divisors, options
from minidist.plan.search.cuts import cuts, layers_of_head
from minidist.plan.search.ladders import Ladder, ladders, least_bytes
from minidist.plan.stages import SPLIT

UNEVEN = "share a step's sequences out unevenly"


def candidates(start: Setup, fixed: Mapping[str, Any], refused: Counter[str]) -> Iterator[Ladder]:
    """Yield every layout whose numbers fit together; count the others by reason."""
    for base in axes(start, fixed, refused):
        for run in shared_out(base, fixed, refused):
            least = least_bytes(run, fixed["offload"])
            for same in scheduled(run, fixed, refused):
                yield from ladders(same, least, fixed, refused)


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


def scheduled(
    base: Setup, fixed: Mapping[str, Any], refused: Counter[str]
) -> Iterator[list[Setup]]:
    """Yield a layout with each schedule that fits its microbatches, and with each cut for it."""
    head = layers_of_head(base)
    for schedule, chunks in schedules(base, fixed):
        run = replace(base, schedule=schedule, chunks=chunks)
        if reason := misfit_of_schedule(run):
            refused[reason] += 1
        else:
            yield cuts(run, head)


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
    # each rank along cp has two chunks of a sequence, and each along tp a share of those
    if start.sequence % ((2 * cp if cp > 1 else 1) * tp):
        return "cut sequences unevenly"
    if machine.slower:
        apart = machine.gpus * pp % machine.total == 0
        return "" if apart else "have a stage on two sites"
    return ""
