"""Context parallelism: which rank computes how many pairs of a query and a key, hop by hop."""

from __future__ import annotations

from figures.shapes import PALETTE, Block, Choice, Figure, Kind, Row, State
from minidist.full.context.order import meeting, pairs

OWN = 64  # tokens of a rank


def draw(order: str, ranks: str) -> State:
    """Count the pairs that meet, as the package's ring of attention looks them up."""
    count = int(ranks)
    work = [
        [
            pairs(meeting(order, rank, (rank - hop) % count, OWN), OWN) / OWN**2
            for hop in range(count)
        ]
        for rank in range(count)
    ]
    totals = [sum(hops) for hops in work]
    waited = sum(max(hops[hop] for hops in work) for hop in range(count))
    mean = sum(totals) / count
    rows = []
    for rank, hops in enumerate(work):
        blocks = [Block(round(done, 4), hop % 8, str(hop)) for hop, done in enumerate(hops) if done]
        rows.append(Row(f"rank {rank}", tuple(blocks), f"{totals[rank]:.2f}"))
    slowest = max(totals) / mean
    said = f"The slowest rank computes {slowest:.3f} times the mean"
    more = f"; with a wait after each hop the step takes {waited / mean:.3f} times the mean"
    return State(f"{said}{more}.", tuple(rows), round(max(totals), 4))


FIGURE = Figure(
    name="context",
    title="Who computes how much of a causal attention",
    question="Which order of the tokens gives every rank the same work, in every hop of the ring?",
    choices=(
        Choice("order", ("contiguous", "zigzag", "striped"), "contiguous"),
        Choice("ranks", ("2", "4", "8"), "4", slider=True),
    ),
    kinds=tuple(Kind(f"hop {hop}", *look) for hop, look in enumerate(PALETTE)),
    unit="(T/P)² pairs",
    digits=2,
    draw=draw,
)
