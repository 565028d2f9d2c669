"""Pipelines: the plan of each schedule on a clock, and how much of it is bubble."""

from __future__ import annotations

from figures.shapes import BLUE, GREEN, ORANGE, PINK, Block, Choice, Figure, Kind, Row, State
from minidist.full.pipeline import NAMES, Timeline, plan, simulate
from minidist.full.pipeline.actions import Kind as Action

KINDS = {
    Action.FORWARD: Kind("forward", *BLUE),
    Action.BACKWARD: Kind("backward", *GREEN),
    Action.INPUTS: Kind("backward for inputs", *PINK),
    Action.WEIGHTS: Kind("backward for weights", *ORANGE),
}
CHUNKS = {"interleaved": 2, "zb1p": 2}


def draw(schedule: str, ranks: str, microbatches: str) -> State:
    """Run a plan on a clock: a forward takes 1, a backward 2, each of its halves 1.

    A rank with two stages has halves of them, so that all schedules have the same work.
    """
    chunks = CHUNKS.get(schedule, 1)
    try:
        made = plan(schedule, int(ranks), int(microbatches), chunks)
    except ValueError as error:
        return State(f"Refused: {error}.")
    part = int(ranks) / made.stages
    timeline = simulate(made, part, 2 * part, part, part)
    share = f"{timeline.bubble:.1%}"
    said = f"The bubble is {share} of the step, which takes {timeline.length:g} forwards"
    rows = tuple(row_of(timeline, rank) for rank in range(made.ranks))
    return State(f"{said}.", rows, timeline.length)


def row_of(timeline: Timeline, rank: int) -> Row:
    """Return what a rank does, with its gaps."""
    kinds, blocks, now = list(KINDS), [], 0.0
    for action, start, end in timeline.spans(rank):
        if start > now + 1e-9:
            blocks.append(Block(round(start - now, 6)))
        if end > start:
            length = round(end - start, 6)
            blocks.append(Block(length, kinds.index(action.kind), str(action.microbatch)))
        now = end
    if timeline.length > now + 1e-9:
        blocks.append(Block(round(timeline.length - now, 6)))
    idle = timeline.idle[rank] / timeline.length
    return Row(f"rank {rank}", tuple(blocks), f"idle {idle:.0%}")


FIGURE = Figure(
    name="pipelines",
    title="A pipeline's bubble",
    question="Which schedule idles least, and what do more microbatches do?",
    choices=(
        Choice("schedule", NAMES, "1f1b"),
        Choice("stages", ("2", "4", "8"), "4", slider=True),
        Choice("microbatches", ("4", "8", "16"), "8", slider=True),
    ),
    kinds=tuple(KINDS.values()),
    unit="forwards",
    digits=1,
    draw=draw,
)
