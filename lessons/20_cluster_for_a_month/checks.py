"""Lesson 20: what is checked, and for how many points. No task has ranks: each case is a question
and its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from judges import Layout, judge_step, run_step, seconds_of
from judges_best import judge_best, run_best
from judges_bill import judge_bill, run_bill
from judges_memory import judge_fits, judge_held, room_of, run_fits
from judges_memory import run_held as run_memory
from judges_proposals import a_machine, a_model, packed, plans, proposals
from judges_watch import (
    judge_diagnose,
    judge_undefended,
    run_diagnose,
    run_undefended,
)

from minidist.course.grader.contract import STRATEGIES, TRAINER, Case, Check, Draw, Task

BY_HAND = ("minidist.budget", "minidist.plan", "minidist.cli", "minidist.bench")
# once for all cases: the solution needs it
TIME = Task(1, "time and money", BY_HAND, imports=("minidist.budget",))
MEMORY = Task(2, "the memory of a GPU", BY_HAND)
CHOICE = Task(3, "the best of many layouts", BY_HAND)
BUBBLE = Task(4, "a bubble, as measured", (*BY_HAND, *STRATEGIES))
WATCH = Task(5, "what a plan does not defend against", (*BY_HAND, *TRAINER))


# ---------------------------------------------------------------- cases


def each(make: Callable[..., Case], *shapes: tuple[object, ...]) -> Draw:
    """Make a case of each shape."""
    return lambda rng: [make(rng, *shape) for shape in shapes]


def a_step(rng: np.random.Generator, layout: Layout, many: int, slow: float = 0.0) -> Case:
    """Ask for a step with `many` microbatches; gradients take `slow` times, or more, what one
    backward hides.
    """
    model, batch = a_model(rng), many * layout.dp * layout.microbatch
    machine = a_machine(rng, layout.dp * layout.tp * layout.pp)
    if slow:
        hides = seconds_of(model, machine, layout, batch)
        hides = (2 / 3 * hides["computing"] + hides["recomputing"]) / many
        bytes = 2 * (layout.dp - 1) / layout.dp * 2 * model.parameters / (layout.tp * layout.pp)
        cards = max(1, machine.node // layout.tp)  # of a ring along dp, in a node
        machine = machine._replace(
            card=8 * bytes / (slow * hides * rng.uniform(1.3, 1.9)) / 1e9 / cards
        )
    return Case((packed(model, machine, layout=layout, batch=batch),), layout.words())


def a_bill(rng: np.random.Generator, gpus: int) -> Case:
    """Ask for the cost of a run; its last step is not full."""
    model, batch = a_model(rng), 64 * int(rng.integers(1, 16))
    tokens = batch * model.sequence * (int(rng.integers(1000, 9000)) + rng.uniform(0.1, 0.9))
    run = np.array([rng.uniform(5, 60), np.floor(tokens)])
    return Case((packed(model, a_machine(rng, gpus), batch=batch, run=run),), f"{gpus} GPUs")


def holding(rng: np.random.Generator, many: int, *layouts: Layout) -> Case:
    """Ask for the bytes of layouts; `many`: sequences for each replica of the largest dp."""
    batch = many * max(layout.dp for layout in layouts)
    given = packed(a_model(rng), layouts=layouts, batch=batch)
    return Case((given,), f"{len(layouts)} layouts")


def room(rng: np.random.Generator, gpus: int) -> Case:
    """Ask for replicas, and whether bytes just above and just below what is free fit."""
    machine = a_machine(rng, gpus)
    free, reserved = room_of(machine), machine.reserved * 2**30
    sizes = [
        1.001 * free,
        0.999 * free,
        0.96 * free,
        0.5 * free,
        1.2 * free,
        free + reserved / 2,
        free - reserved / 2,
    ]
    bytes = np.array(sizes)[:, None] * rng.dirichlet(np.ones(4), len(sizes))
    return Case((packed(a_model(rng), machine, bytes=bytes),), f"{gpus} GPUs")


def full(rng: np.random.Generator, gpus: int) -> Case:
    """Ask for bytes that fill the memory just so, and for one more and one less, in numbers without
    rounding.
    """
    machine = a_machine(rng, gpus)._replace(memory=64.0, reserved=8.0)
    exact = np.array([16, 8, 24, 8]) * 2.0**30
    return Case(
        (
            packed(
                a_model(rng),
                machine,
                bytes=np.array([exact, exact + np.eye(4)[1], exact - np.eye(4)[2]]),
            ),
        ),
        "just full",
    )


def diagnoses(rng: np.random.Generator, *rows: tuple[Layout, int, float]) -> Case:
    """Ask about layouts with so many sequences a replica; idle are `times` as long as by the
    formula, or just 15 %.
    """
    model, layouts, told = a_model(rng, 48), [], []
    for layout, many, times in rows:
        m = many // layout.microbatch
        share = times * (layout.pp - 1) / (layout.chunks * m + layout.pp - 1)
        seconds = rng.uniform(5, 30)
        layouts.append(layout)
        idle = share * seconds * rng.uniform(0.99, 1.01)
        told.append([many * layout.dp, *((seconds, idle) if times else (20, 3))])
    return Case((packed(model, layouts=layouts, measured=told),), f"{len(rows)} pipelines")


# ---------------------------------------------------------------- the checks


def parts(*names: str) -> Callable[..., None]:
    """Return a judge of some parts of a step."""
    return partial(judge_step, parts=names)


def kinds(*names: str) -> Callable[..., None]:
    """Return a judge of some categories of memory."""
    return partial(judge_held, kinds=names)


def about(*names: str) -> Callable[..., None]:
    """Return a judge of some failures."""
    return partial(judge_undefended, about=names)


def refusing(*reasons: str) -> Callable[..., None]:
    """Return a judge of the layouts that are refused for some reasons."""
    return partial(judge_best, about=reasons, choose=False)


TWENTY = each(proposals, (64,), (32,))
EXACT = 0.0
ALONE, TEAM = Layout(4, 1, 1, 1, 2), Layout(8, 4, 4)
AGAIN = Layout(2, 8, 4, 1, 3, True, 1, True)
WIDE, DEEP = Layout(2, 16, 2, 1, 3), Layout(4, 2, 8, 3, 5, False, 1, True)
STATES = (
    Layout(16, 4, 2),
    Layout(16, 4, 2, zero=1),
    Layout(8, 1, 4, zero=1),
    Layout(16, 4, 2, 1, 16),
)  # one microbatch
KEPT = (Layout(4, 4, 1), Layout(4, 4, 1, sp=True), Layout(4, 1, 1, 1, 2))
FLIGHT = (
    Layout(2, 4, 4),
    Layout(2, 2, 4, 3, 2),
    Layout(2, 4, 16, 1, 4),
    Layout(1, 4, 2, 2),
    Layout(2, 2, 4, 2, 6),
)
WORK = (
    Layout(4, 4, 2, recompute=True),
    Layout(2, 8, 4, 1, 2, True, 0, True),
    Layout(2, 2, 4, 3, 1, False, 1, True),
)
CUT = (
    (Layout(2, 1, 8), 64, 1.0),  # nothing
    (Layout(4, 2, 4, 1, 4), 64, 1.05),  # fewer sequences in a microbatch
    (Layout(4, 2, 4, 1, 6), 96, 1.05),
    (Layout(8, 1, 8, 1, 1), 16, 1.1),  # no more microbatches: chunks
    (Layout(8, 1, 4, 1, 2), 8, 1.1),
    (Layout(2, 1, 16, 1, 1), 16, 1.0),  # nor chunks: zero bubble
    (Layout(8, 2, 4, 2, 2), 12, 1.1),
    (Layout(8, 1, 4), 9, 1.1),  # chunks: 14.3 % of the step, but 16.7 % of the ideal time
    (Layout(2, 1, 8, 2), 16, 1.1),  # three chunks for two
    (Layout(2, 1, 16), 32, 1.1),  # a chunk for each layer
)
SLOW = (
    (Layout(4, 2, 4, 1, 1), 64, 5.0),
    (Layout(4, 2, 4, 1, 4), 64, 1.9),
    (Layout(8, 1, 2, 1, 1), 16, 2.8),
    (Layout(2, 1, 8, 2, 1), 64, 1.0),
    (Layout(4, 2, 4, 1, 4), 64, 1.4),
    (Layout(4, 2, 4), 18, 1.2),  # the formula says 14.3 %, and no more than that is the schedule's
    (Layout(8, 1, 4), 17, EXACT),
)
OTHERS = (
    (Layout(2, 2, 8, 1, 3), 72, 1.1),
    (Layout(4, 1, 6, 2, 1), 12, 1.2),
    (Layout(2, 4, 4, 1, 2), 48, 2.5),
    (Layout(4, 1, 2, 1, 8), 32, 1.1),
    (Layout(8, 1, 3, 1, 4), 12, 1.1),
    (Layout(4, 2, 16, 1, 2), 40, 1.6),
    (Layout(4, 2, 16, 1, 2), 40, 1.3),
)

CHECKS = [
    Check(
        TIME,
        "computing",
        4,
        each(a_step, (ALONE, 4), (AGAIN, 8)),
        run_step,
        parts("computing", "recomputing"),
    ),
    Check(
        TIME,
        "tensor parallelism",
        4,
        each(a_step, (TEAM, 8, 1), (AGAIN, 8, 1), (WIDE, 4, 1)),
        run_step,
        parts("tensor"),
    ),
    Check(
        TIME,
        "the bubble",
        4,
        each(a_step, (TEAM, 8), (AGAIN, 8), (DEEP, 16)),
        run_step,
        parts("bubble"),
    ),
    Check(
        TIME,
        "gradients, hidden in part",
        4,
        each(a_step, (TEAM, 8, 1), (AGAIN, 4, 6), (Layout(8, 2, 2), 8, 1), (Layout(4, 2, 2), 8, 1)),
        run_step,
        parts("data"),
    ),
    Check(TIME, "days, money and MFU", 4, each(a_bill, (64,), (16,), (4,)), run_bill, judge_bill),
    Check(MEMORY, "replicas, and what fits", 3, each(room, (64,), (48,)), run_fits, judge_fits),
    Check(MEMORY, "what fits just so", 1, each(full, (64,)), run_fits, judge_fits),
    Check(
        MEMORY,
        "parameters, gradients, optimizer",
        5,
        each(holding, (16, *STATES)),
        run_memory,
        kinds("parameters", "gradients", "optimizer"),
    ),
    Check(
        MEMORY,
        "activations of a layer",
        4,
        each(holding, (8, *KEPT)),
        run_memory,
        kinds("activations"),
    ),
    Check(
        MEMORY,
        "microbatches under way",
        4,
        each(holding, (24, *FLIGHT)),
        run_memory,
        kinds("activations"),
    ),
    Check(MEMORY, "recomputing", 3, each(holding, (32, *WORK)), run_memory, kinds("activations")),
    Check(
        CHOICE,
        "what does not divide",
        3,
        TWENTY,
        run_best,
        refusing("gpus", "heads", "layers", "batch"),
    ),
    Check(CHOICE, "nodes, and stages", 2, TWENTY, run_best, refusing("node", "stages")),
    Check(
        CHOICE,
        "memory, and the best",
        3,
        TWENTY,
        run_best,
        partial(judge_best, about=("", "memory")),
    ),
    Check(
        CHOICE,
        "equally fast ones",
        4,
        each(proposals, (64, True)),
        run_best,
        partial(judge_best, about=()),
    ),
    Check(
        CHOICE,
        "none that fits",
        2,
        each(proposals, (16, False, True)),
        run_best,
        partial(judge_best, about=("memory",)),
    ),
    Check(
        BUBBLE,
        "the two shares",
        6,
        each(diagnoses, CUT),
        run_diagnose,
        partial(judge_diagnose, shares=True),
    ),
    Check(BUBBLE, "what helps", 5, each(diagnoses, CUT), run_diagnose, judge_diagnose),
    Check(BUBBLE, "what does not help", 5, each(diagnoses, SLOW), run_diagnose, judge_diagnose),
    Check(
        WATCH,
        "checkpoints",
        5,
        each(plans, (64, 24)),
        run_undefended,
        about("dead node", "torn checkpoint", "bad loss"),
    ),
    Check(
        WATCH,
        "hangs and slow ranks",
        3,
        each(plans, (64, 24)),
        run_undefended,
        about("hang", "slow rank"),
    ),
    Check(
        WATCH,
        "the end of the lease",
        5,
        each(plans, (8, 24), (512, 24)),
        run_undefended,
        about("late end"),
    ),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(
        TIME,
        "other steps",
        3,
        each(a_step, (Layout(4, 8, 2, 2, 1), 16, 1), (DEEP, 8, 12)),
        run_step,
        judge_step,
        hidden=True,
    ),
    Check(
        MEMORY,
        "other layouts",
        3,
        each(holding, (48, *STATES[1:], *FLIGHT, *WORK)),
        run_memory,
        judge_held,
        hidden=True,
    ),
    Check(
        CHOICE,
        "other layouts",
        4,
        each(proposals, (128,), (64, True)),
        run_best,
        judge_best,
        hidden=True,
    ),
    Check(
        BUBBLE,
        "other pipelines",
        4,
        each(diagnoses, OTHERS),
        run_diagnose,
        judge_diagnose,
        hidden=True,
    ),
    Check(
        WATCH,
        "other plans",
        3,
        each(plans, (256, 40)),
        run_undefended,
        judge_undefended,
        hidden=True,
    ),
]
