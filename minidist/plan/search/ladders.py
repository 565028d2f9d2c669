"""What saves memory: ZeRO and recomputing, as rungs of ladders.

    ladder            rungs, each slower than the one before it, and smaller
    without ZeRO      keeps all ─▶ recomputes all
    ZeRO 1 and 2      1, keeps all ─▶ 2, keeps all ─▶ 1, recomputes all ─▶ 2, recomputes all
    ZeRO 3            keeps all ─▶ recomputes all; a ladder for each size of a group of shards

A ladder is climbed until a rung fits. Where states alone are more than a GPU holds, no rung can fit,
and none is made: the states of a layout depend on neither its schedule nor what it recomputes, so
`least_bytes` counts them once for all of those.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from minidist.plan.memory import states
from minidist.plan.run import Setup
from minidist.plan.search.choices import divisors, options

# a pipeline with these reduces gradients in the backward of each microbatch
REDUCING = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Ladder:
    """Layouts that differ in what saves memory: each is slower than the one before it, and smaller.

    ZeRO 2, which reduces the gradients of each microbatch, has a rung behind each of ZeRO 1; it may
    be slower than later ones. `same` are cuts of one layout, `policies` ways to recompute, `zeros`
    stages of ZeRO, in groups of `group` ranks. No rung holds less than `least` bytes.
    """

    same: Sequence[Setup]
    policies: Sequence[str]
    zeros: Sequence[int]
    group: int
    offload: bool
    least: float

    def __len__(self) -> int:
        return len(self.policies) * len(self.same) * len(self.zeros)

    def __iter__(self) -> Iterator[Setup]:
        for policy, cut, zero in product(self.policies, self.same, self.zeros):
            yield sharded(cut, zero, self.group, self.offload, policy)


def least_bytes(run: Setup, offload: bool) -> Callable[[int, int], float]:
    """Return what says by stage of ZeRO and size of a group how many bytes each layout of a run holds
    at least, whatever its schedule and its cut: states of as many layers as the mean rank along pp has.

    They are counted once.
    """
    layers = -(-run.model.layers // run.pp)  # some rank has at least as many as the mean one
    leading = min(layers, run.model.dense_layers)

    @cache
    def least(zero: int, group: int) -> float:
        one = sharded(run, zero, group, offload, "none")
        # It may have leading layers in place of others, and those may be smaller.
        return min(sum(states(one, layers, tables=0, leading=each)) for each in (0, leading))

    return least


def ladders(
    same: list[Setup],
    least: Callable[[int, int], float],
    fixed: Mapping[str, Any],
    refused: Counter[str],
) -> Iterator[Ladder]:
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

    def ladder(zeros: Sequence[int], group: int = 0) -> Ladder:
        return Ladder(
            same,
            policies=again,
            zeros=zeros,
            group=group,
            offload=fixed["offload"],
            least=min(least(zero, group) for zero in zeros),
        )

    if 0 in offered:
        yield ladder([0])
    together = [zero for zero in offered if zero in (1, 2)]
    if together:
        yield ladder(together)
    if 3 in offered:
        for group in groups(base, fixed):
            yield ladder([3], group)


def zero_pays(run: Setup, zero: int, fixed: Mapping[str, Any]) -> bool:
    """Tell whether a stage of ZeRO makes a layout another one, and no worse one."""
    if run.dp * run.cp == 1:  # nobody to share with: ZeRO is only good for offloading
        alone = 1 if fixed["offload"] else 0
        return zero == alone
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


def groups(run: Setup, fixed: Mapping[str, Any]) -> list[int]:
    """Return how many ranks ZeRO 3 may shard over: all (0), a part of a node, or whole nodes."""
    ranks = run.dp * run.cp
    node = max(1, run.machine.node // run.tp)
    found = [0]
    if run.ep == 1:
        for part in divisors(ranks)[1:-1]:
            if part % node == 0 or node % part == 0:
                found.append(part)
    return [each for each in found if each == fixed.get("hsdp", each)]


def sharded(run: Setup, zero: int, group: int, offload: bool, policy: str) -> Setup:
    """Return a layout with a stage of ZeRO and a way to recompute."""
    return replace(run, zero=zero, hsdp=group, recompute=policy, offload=zero > 0 and offload)
