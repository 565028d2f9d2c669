"""Every layout whose numbers fit together, and why the others do not.

for tp, pp, cp; for microbatch, ep; for order; for ZeRO, recomputing; for schedule, chunks; for hsdp
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from minidist.parallel.pipeline.schedules import CHUNKED
from minidist.plan.parts.layer import passes
from minidist.plan.run import Setup
from minidist.plan.search.choices import LONG, divisors, options

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
