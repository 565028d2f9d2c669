"""What a GPU holds under each stage of ZeRO: the planner's bytes, which tests compare with runs."""

from __future__ import annotations

from figures.shapes import Block, Choice, Figure, Kind, Row, State, ink_on
from minidist.draw.plan import BYTES
from minidist.plan.device import machine
from minidist.plan.memory import GB, bytes_held
from minidist.plan.model import model
from minidist.plan.run import Setup

ROOM = 80.0  # GB of an A100 or H100
TOKENS = 4096


def draw(name: str, ranks: str, recompute: str) -> State:
    """Return a row for each stage of ZeRO, at one sequence of 4,096 tokens a rank."""
    rows, fits = [], []
    for stage in range(4):
        run = Setup(
            model(name),
            machine(f"a100:{ranks}"),
            TOKENS,
            int(ranks),
            dp=int(ranks),
            zero=stage,
            recompute=recompute,
            fused_loss=True,
        )
        held = {kind: count / GB for kind, count in bytes_held(run).items()}
        total = sum(held.values())
        blocks = [
            Block(round(count, 2), list(BYTES).index(kind)) for kind, count in held.items() if count
        ]
        rows.append(Row(f"ZeRO-{stage}" if stage else "DDP", tuple(blocks), f"{total:,.1f} GB"))
        if total <= ROOM:
            fits.append(rows[-1].name)
    longest = max(ROOM, *(sum(block.length for block in row.blocks) for row in rows))
    found = f"Of 80 GB, {fits[0]} is the first that fits" if fits else "Nothing fits in 80 GB"
    return State(f"{found}.", tuple(rows), round(longest, 2), (ROOM, "80 GB"))


FIGURE = Figure(
    name="zero",
    title="What each stage of ZeRO holds",
    question="Which stage of ZeRO fits this model into a GPU of 80 GB?",
    choices=(
        Choice("model", ("gpt2-xl", "llama-7b", "llama-13b", "llama-70b", "gpt3-175b"), "llama-7b"),
        Choice("ranks", ("1", "2", "8", "16", "64", "256", "1024"), "8", slider=True),
        Choice("recompute", ("none", "full"), "none"),
    ),
    kinds=tuple(Kind(name, look.colour, ink_on(look.colour)) for name, look in BYTES.items()),
    unit="GB",
    digits=1,
    draw=draw,
)
