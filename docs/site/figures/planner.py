"""The planner: which layouts are fastest for a model on a cluster, and where their time goes."""

from __future__ import annotations

from functools import cache

from figures.shapes import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
    Block,
    Choice,
    Figure,
    Kind,
    Row,
    State,
)
from minidist.cli.plan.answer import mfu, name_of
from minidist.cli.plan.command import parser, setup
from minidist.cli.plan.runnable import offers
from minidist.plan.device import PlanError
from minidist.plan.memory import GB
from minidist.plan.search import Found, search

STEP = {
    "computing": BLUE,
    "recomputing": SKY,
    "tensor": ORANGE,
    "context": YELLOW,
    "expert": PINK,
    "sharding": RED,
    "pipeline": ("#882255", "#ffffff"),
    "bubble": GREY,
    "data": GREEN,
    "all else": ("#666666", "#ffffff"),
}
BYTES = {
    "parameters": BLUE,
    "gradients": GREEN,
    "optimizer": SKY,
    "activations": ORANGE,
    "logits": YELLOW,
    "communication": PINK,
    "resident": GREY,
}
SHOWN = 5
SECONDS, MEMORY = "seconds of a step", "GB of a GPU"
LEAST = 1e-4  # of a step: what is shorter cannot be seen


@cache
def answer(model: str, cluster: str) -> tuple[Found, ...] | str:
    """Return the layouts that `python -m minidist plan` shows, or the sentence that says why there
    are none.
    """
    asked = parser().parse_args(["--model", model, "--cluster", cluster])
    try:
        found = search(setup(asked), {}, asked.reserve)
    except PlanError as error:
        return str(error)
    offered, _ = offers(found.groups(), SHOWN)
    return tuple(each.found for each in offered)


def draw(model: str, cluster: str, what: str) -> State:
    """Return a row for each of the best layouts."""
    found = answer(model, cluster)
    command = f"python -m minidist plan --model {model} --cluster {cluster}"
    if isinstance(found, str):
        return State(f"{found}. ({command})")
    rows = tuple(row_of(each, what) for each in found)
    length = max(sum(block.length for block in row.blocks) for row in rows)
    room = found[0].run.machine.device.memory / GB
    said = f"{name_of(found[0].run)}: {found[0].seconds:,.2f} s a step, {mfu(found[0]):.1%} MFU"
    if what == MEMORY:
        return State(f"{said}. ({command})", rows, max(room, length), (room, f"{room:g} GB"))
    return State(f"{said}. ({command})", rows, length)


def row_of(found: Found, what: str) -> Row:
    """Return the seconds of a layout, or its bytes."""
    if what == MEMORY:
        values = {kind: found.bytes.get(kind, 0.0) / GB for kind in BYTES}
        note = f"{sum(found.bytes.values()) / GB:,.1f} GB"
    else:
        values = {kind: found.step.get(kind, 0.0) for kind in STEP if kind != "all else"}
        values["all else"] = found.seconds - sum(values.values())
        note = f"{found.seconds:,.2f} s, {mfu(found):.1%} MFU"
    kinds = [*STEP, *BYTES]
    least = LEAST * sum(values.values())
    blocks = [
        Block(round(value, 4), kinds.index(kind) if what == SECONDS else len(STEP) + at)
        for at, (kind, value) in enumerate(values.items())
        if value > least
    ]
    return Row(name_of(found.run), tuple(blocks), note)


FIGURE = Figure(
    name="planner",
    title="Which layout for this model on this cluster?",
    question="The planner tries some ten thousand layouts. These five that differ are the fastest.",
    choices=(
        Choice("model", ("llama-7b", "llama-70b", "mixtral-8x7b", "gpt3-175b"), "llama-70b"),
        Choice("cluster", ("h100:8", "h100:64", "a100:64", "h100:512"), "h100:64"),
        Choice("shown", (SECONDS, MEMORY), SECONDS),
    ),
    kinds=tuple(Kind(name, *look) for name, look in (*STEP.items(), *BYTES.items())),
    unit="",
    digits=2,
    draw=draw,
)
