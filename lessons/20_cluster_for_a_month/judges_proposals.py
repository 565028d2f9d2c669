"""Lesson 20: what models, machines, layouts and plans the checks ask about. Task 3's layouts show
who chooses well, and task 5's plans who counts hours well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
from judges import Layout, Machine, Model, same
from judges_best import REASONS, choice, measured, reasons, refusal
from judges_memory import bytes_of
from judges_watch import (
    LOOKS,
    Plan,
    hours_of,
)

from minidist.course.grader.contract import Arrays, Case


def a_model(rng: np.random.Generator, layers: int = 0) -> Model:
    """Draw a model with heads of 128 channels."""
    heads = 16 * int(rng.integers(1, 5))
    hidden, layers = 128 * heads, layers or 16 * int(rng.integers(1, 6))
    vocabulary = 1000 * int(rng.integers(32, 128))
    return Model(
        12.0 * layers * hidden**2 + vocabulary * hidden,
        layers,
        hidden,
        heads,
        2048 * int(rng.integers(1, 5)),
    )


def a_machine(rng: np.random.Generator, gpus: int, node: int = 8) -> Machine:
    """Draw a machine with so many GPUs."""
    peak, memory = rng.choice([312e12, 989e12, 2250e12]), rng.choice([39.4, 79.6, 139.8])
    inside, card = rng.choice([235.0, 365.0, 680.0]), rng.choice([100.0, 200.0, 400.0])
    reached, price = round(rng.uniform(0.4, 0.75), 3), node * round(rng.uniform(1.2, 4.8), 2)
    return Machine(
        gpus, node, peak, reached, memory, round(rng.uniform(2, 8), 1), inside, card, price
    )


def packed(model: Model, machine: Machine | None = None, **more: object) -> Arrays:
    """Return what a rank is given, as arrays."""
    given = {
        "model": np.array(model, float),
        **{name: np.array(value) for name, value in more.items()},
    }
    return given | ({"machine": np.array(machine, float)} if machine else {})


def proposals(rng: np.random.Generator, gpus: int, tie: bool = False, none: bool = False) -> Case:
    """Draw twenty layouts with every reason among them; the fastest of all does not fit."""
    while True:
        layers, batch = 8 * int(rng.integers(3, 8)), gpus * 3 // int(rng.choice([2, 4]))
        model, machine = (
            a_model(rng, layers)._replace(heads=int(rng.choice([12, 20, 28]))),
            a_machine(rng, gpus),
        )
        found: dict[str, set[Layout]] = defaultdict(set)
        for _ in range(400):
            layout = any_layout(rng, gpus)
            found[refusal(model, machine._replace(memory=1e6), layout, batch)].add(layout)
        if len(found[""]) < 8 or min(len(found[reason]) for reason in WRONG) < 2:
            continue
        if not all(
            any(after in reasons(model, machine, each, batch) for each in found[reason])
            for reason, after in pairwise(WRONG)
        ):  # no layout shows which of two reasons is asked for first
            continue
        bytes = {layout: sum(bytes_of(model, layout, batch).values()) for layout in found[""]}
        some = sorted(bytes, key=bytes.__getitem__)
        few = [
            each
            for each in some[len(some) * 2 // 3 :]
            if batch < each.pp * each.chunks * each.dp * each.microbatch
        ]
        some = [some[int(i)] for i in np.linspace(0, len(some) - 1, 8)]
        if few:  # it has enough microbatches for its stages, not for all of their chunks
            some[6] = few[0]
        room = bytes[some[0]] * 0.9 if none else (bytes[some[3]] + bytes[some[4]]) / 2
        machine = machine._replace(memory=room / 2**30 + machine.reserved)
        wrong = [
            each
            for reason in WRONG
            for each in two_of(
                rng, sorted(found[reason]), partial(reasons, model, machine, batch=batch)
            )
        ]
        if tie:  # the same layouts without ZeRO's shards: as fast, and larger
            some = [each._replace(zero=zero) for each in some[:4] for zero in (0, 1)] + some[4:]
        if not none and not hard(model, machine, some, batch, tie):
            continue
        layouts = [*some, *wrong]
        if tie:
            layouts.append(layouts[choice(model, machine, layouts, batch)])
        layouts = [layouts[int(i)] for i in rng.permutation(len(layouts))]
        layouts = largest_first(model, machine, layouts, batch) if tie else layouts
        given = packed(model, machine, layouts=layouts, batch=batch)
        return Case((given,), f"{len(layouts)} layouts of {gpus} GPUs")


def largest_first(
    model: Model, machine: Machine, layouts: list[Layout], batch: int
) -> list[Layout]:
    """Sort the fastest by size, where they are, so that neither the first of them is the best nor
    the last.
    """
    fastest = measured(model, machine, layouts[choice(model, machine, layouts, batch)], batch)[0]
    sizes = {}
    for i, layout in enumerate(layouts):
        seconds, bytes = measured(model, machine, layout, batch)
        if same(seconds, fastest) and not refusal(model, machine, layout, batch):
            sizes[i] = bytes
    found = list(layouts)
    for place, i in zip(sizes, sorted(sizes, key=lambda i: -sizes[i]), strict=True):
        found[place] = layouts[i]
    return found


def two_of(
    rng: np.random.Generator, layouts: list[Layout], reasons: Callable[[Layout], list[str]]
) -> list[Layout]:
    """Return two layouts that are refused for the same first reason, the first for the next reason,
    too.

    Of those that are not for all GPUs, the second has no other fault, if there is one.
    """
    first = reasons(layouts[0])[0]
    after = REASONS[REASONS.index(first) + 1]
    both = [each for each in layouts if after in reasons(each)]
    alone = [each for each in layouts if first == "gpus" and {*reasons(each)} <= {"gpus", "memory"}]
    return [some[int(rng.integers(len(some)))] for some in (both or layouts, alone or layouts)]


def hard(model: Model, machine: Machine, layouts: list[Layout], batch: int, tie: bool) -> bool:
    """Tell whether a choice shows who chooses well.

    The best is neither the fastest of all nor the smallest, or it has an equal that is larger. What
    is as fast as the best is so to the last bit, as it differs in nothing that takes time.
    """
    costs = {each: measured(model, machine, each, batch) for each in layouts}
    left = [each for each in layouts if not refusal(model, machine, each, batch)]
    if not left:
        return False
    fastest = min(costs[each][0] for each in left)
    equals = [each for each in left if same(costs[each][0], fastest)]
    sizes = {costs[each][1] for each in equals}
    if len({each._replace(zero=0, sp=False) for each in equals}) > 1:
        return False
    if tie:
        return len(sizes) > 1
    return fastest > min(costs.values())[0] and min(sizes) > min(costs[each][1] for each in left)


WRONG = ("gpus", "node", "heads", "layers", "batch", "stages")


def any_layout(rng: np.random.Generator, gpus: int) -> Layout:
    """Draw a layout, with mistakes."""
    tp, pp = int(rng.choice([1, 2, 4, 8, 16])), int(rng.choice([1, 2, 3, 4, 5, 8]))
    dp = max(1, gpus // (tp * pp))
    dp = int(rng.choice([dp, dp, dp, dp, 2 * dp, max(1, dp // 2)]))
    chunks = int(rng.choice([1, 1, 2, 3])) if pp > 1 else 1
    flags = rng.integers(0, 2, 3)
    return Layout(
        dp,
        tp,
        pp,
        chunks,
        int(rng.choice([1, 1, 2, 3])),
        bool(flags[0]) and tp > 1,
        int(flags[1]),
        bool(flags[2]),
    )


def plans(rng: np.random.Generator, gpus: int, many: int) -> Case:
    """Draw plans, each late or in time by less than some mistake in counting hours, and each
    mistake as often.
    """
    rows: list[Plan] = []
    shown: Counter[str] = Counter()
    for number in range(many):
        hours, mtbf, restart = rng.uniform(2000, 6000), rng.uniform(3e4, 6e4), rng.uniform(0.2, 2)
        every = rng.choice([2, 6, 24]) if number % 6 else 0
        kept, shared = (
            int(rng.integers(1, 5)),
            (rng.random() < 0.7 if number % 6 else number % 4 == 0),
        )
        apart = every or 6  # so that somebody looks where no checkpoint is written, too
        noticed = rng.choice(
            [0, (kept - rng.uniform(0.2, 0.8)) * apart, (kept - rng.uniform(1.2, 1.8)) * apart]
        )
        noticed = max(0.0, noticed) if number % 4 else (kept - 1) * apart
        limit, by_rank = rng.random(2) < 0.5
        plan = Plan(gpus, hours, hours, mtbf, every, kept, shared, restart, limit, by_rank, noticed)
        takes = hours_of(plan)
        guesses = {
            how: hours_of(plan, how) for how in LOOKS if not same(hours_of(plan, how), takes)
        }
        how = min(guesses, key=shown.__getitem__)
        shown[how] += 1
        rows.append(plan._replace(rented=takes + rng.uniform(0.2, 0.8) * (guesses[how] - takes)))
    # two failures of 16 hours: just in time
    rows.append(Plan(64, 1024, 1056, 32768, 16, 2, True, 8, True, True, 16))
    return Case(({"plans": np.array(rows, float)},), f"{many} plans for {gpus} GPUs")
