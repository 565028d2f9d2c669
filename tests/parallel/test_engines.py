"""Training on ranks that take turns: what a backward sends is sent in turns, and gives the same
bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minidist
from minidist import Cluster, Communicator
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT, GPTConfig, Where
from minidist.full.trainer.loop import carried_of, loss_of
from minidist.further import Recipe, parallelize

SIZES = GPTConfig(
    vocabulary=64,
    layers=4,
    hidden=16,
    heads=2,
    key_value_heads=2,
    intermediate=32,
    sequence=8,
)
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "dp 3": (
        Layout(dp=3),
        {"microbatches": 1, "bucket_mib": 0.01},
    ),  # several buckets leave during a backward
    "dp 2, zero 3": (Layout(dp=2), {"microbatches": 1, "zero": 3}),
    "pp 2": (Layout(pp=2), {"schedule": "1f1b", "microbatches": 4}),
    "dp 2 x pp 2 x tp 2": (Layout(dp=2, pp=2, tp=2), {"microbatches": 2, "bucket_mib": 0.01}),
}


def steps(comm: Communicator, layout: Layout, recipe: Recipe) -> tuple[Any, ...]:
    """Train for three steps; return the losses to the last bit, what was sent, and the clock."""
    generator = torch.Generator().manual_seed(5)
    mesh = Mesh(comm, layout)
    model = GPT(SIZES, dtype=torch.float64, generator=generator)
    parallel = parallelize(
        model, mesh, recipe, loss_of(model, mesh), carried_of(model, mesh, recipe)
    )
    groups = [{"params": list(parallel.model.parameters())}]
    optimizer = parallel.optimizer(torch.optim.SGD, groups, elementwise=True, lr=0.1)
    tokens = [torch.randint(64, (2, 8), generator=generator) for _ in range(recipe.microbatches)]
    losses = []
    for _ in range(3):
        parallel.zero_grad()
        losses.append(parallel.step(tokens, tokens, [Where()] * len(tokens)))
        optimizer.step()
    sent = comm.traffic.messages, comm.traffic.bytes
    return [float(loss).hex() for loss in losses], sent, comm.clock()


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_gives_the_same_bits_bytes_and_clock_in_turns(name: str) -> None:
    layout, options = LAYOUTS[name]
    recipe = Recipe(**options)

    def program(comm: Communicator) -> tuple[Any, ...]:
        return steps(comm, layout, recipe)

    cluster = Cluster.uniform(1e-6, 1e9)
    expected = minidist.run(program, layout.size, cluster=cluster)
    for seed in (1, 2):
        found = minidist.run(program, layout.size, cluster=cluster, engine="cooperative", seed=seed)
        assert found == expected
