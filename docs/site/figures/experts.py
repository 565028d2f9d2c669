"""Experts: how many tokens each rank's experts get, as a router learns, or is taught, to share."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from figures.shapes import PALETTE, Block, Choice, Figure, Kind, Row, State
from minidist.full.model import GPTConfig, Where
from minidist.full.model.moe.balance import rebalance
from minidist.full.model.moe.routed import RoutedExperts

EXPERTS, TOP_K = 8, 2
STEPS = ("0", "10", "30", "100", "300")
WAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a loss": {"balance": "aux", "balance_rate": 0.1},
    "a bias": {"balance": "bias", "balance_rate": 0.002},
}


@cache
def trained(way: str) -> dict[str, tuple[int, ...]]:
    """Return the tokens of each expert after some steps of a layer that learns nothing but to
    balance: 512 tokens that have something in common, two experts each.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(8, 64, 8, dtype=torch.float64, generator=generator) + 1
    config = GPTConfig(
        hidden=8,
        heads=1,
        intermediate=16,
        sequence=64,
        experts=EXPERTS,
        top_k=TOP_K,
        **WAYS[way],
    )
    layer = RoutedExperts(config, 0).double()
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    found: dict[str, tuple[int, ...]] = {}
    for step in range(int(STEPS[-1]) + 1):
        layer.router.grad = None
        (0 * layer(tokens, Where(weight=1 / 512))).sum().backward()
        assert layer.router.grad is not None
        layer.router.data -= layer.router.grad
        if str(step) in STEPS:
            found[str(step)] = tuple(map(int, layer.tally[:EXPERTS].tolist()))
        rebalance(layer)
    return found


def draw(way: str, step: str, ranks: str) -> State:
    """Put the experts on so many ranks."""
    loads, count = trained(way)[step], int(ranks)
    each = EXPERTS // count
    rows = []
    for rank in range(count):
        mine = range(rank * each, (rank + 1) * each)
        blocks = [Block(loads[expert], expert, str(expert)) for expert in mine if loads[expert]]
        total = sum(loads[expert] for expert in mine)
        rows.append(Row(f"rank {rank}", tuple(blocks), f"{total} tokens"))
    totals = [sum(block.length for block in row.blocks) for row in rows]
    mean = sum(loads) / count
    busiest = max(totals) / mean
    expert = max(loads) * EXPERTS / sum(loads)
    said = (
        f"The busiest rank has {busiest:.2f} times the mean, the busiest expert {expert:.2f} times"
    )
    return State(f"{said}.", tuple(rows), max(totals))


FIGURE = Figure(
    name="experts",
    title="How evenly experts are loaded",
    question="All ranks wait for the busiest. What evens out the load, and how soon?",
    choices=(
        Choice("balanced by", tuple(WAYS), "nothing"),
        Choice("step", STEPS, "0", slider=True),
        Choice("ranks", ("2", "4", "8"), "4", slider=True),
    ),
    kinds=tuple(Kind(f"expert {expert}", *look) for expert, look in enumerate(PALETTE)),
    unit="tokens",
    draw=draw,
)
