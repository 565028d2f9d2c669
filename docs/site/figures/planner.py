"""The planner: which layouts are fastest for a model on a cluster, and where their time goes."""

from __future__ import annotations

from functools import cache

from figures.shapes import Block, Choice, Figure, Kind, Row, State, ink_on
from minidist.cli.plan.answer import mfu, name_of
from minidist.cli.plan.command import parser, setup
from minidist.cli.plan.runnable import offers
from minidist.draw.plan import BYTES, STEP
from minidist.plan.device import PlanError
from minidist.plan.memory import GB
from minidist.plan.search import Found, search
from minidist.plan.trust.kinds import range_words, trusted

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
    run = found[0].run
    said = (
        f"{name_of(run)} takes {found[0].seconds:,.2f} s a step ({range_words(found[0])}), "
        f"{mfu(found[0]):.1%} MFU. {run.batch:,} sequences of {run.sequence:,} tokens, products of "
        f"{run.precision}. {in_sentences(trusted(found))}"
    )
    if what == MEMORY:
        return State(f"{said} ({command})", rows, max(room, length), (room, f"{room:g} GB"))
    return State(f"{said} ({command})", rows, length)


def in_sentences(lines: str) -> str:
    """Return lines as sentences of one paragraph."""
    return " ".join(f"{line[0].upper()}{line[1:].rstrip('.')}." for line in lines.splitlines())


def row_of(found: Found, what: str) -> Row:
    """Return the seconds of a layout, or its bytes."""
    if what == MEMORY:
        values, kinds, before = {**found.bytes}, list(BYTES), len(STEP)
        values = {kind: count / GB for kind, count in values.items()}
        note = f"{sum(values.values()):,.1f} GB"
    else:
        values, kinds, before = {**found.step}, list(STEP), 0
        note = f"{found.seconds:,.2f} s, {mfu(found):.1%} MFU"
    least = LEAST * sum(values.values())
    blocks = [
        Block(round(value, 4), before + kinds.index(kind))
        for kind, value in values.items()
        if value > least
    ]
    return Row(name_of(found.run), tuple(blocks), note)


FIGURE = Figure(
    name="planner",
    title="Which layout for 64 H100, or another cluster?",
    question="The planner tries some ten thousand layouts. These five are the fastest, and the range "
    "says whether they differ at all.",
    choices=(
        Choice("model", ("llama-7b", "llama-70b", "mixtral-8x7b", "gpt3-175b"), "llama-70b"),
        Choice("cluster", ("h100:8", "h100:64", "a100:64", "h100:512"), "h100:64"),
        Choice("shown", (SECONDS, MEMORY), SECONDS),
    ),
    kinds=tuple(
        Kind(name, look.colour, ink_on(look.colour))
        for name, look in (*STEP.items(), *BYTES.items())
    ),
    unit="",
    digits=2,
    draw=draw,
)
