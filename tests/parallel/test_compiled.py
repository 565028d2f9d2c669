"""Compiled blocks: the same numbers as without, under every strategy, and what a compiler must leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import minidist
from minidist import Communicator
from minidist.mesh import Layout, Mesh
from minidist.model import GPT, GPTConfig, Where
from minidist.parallel import Recipe, parallelize
from minidist.parallel.compiled import as_they_were, compile_blocks
from minidist.trainer.spread import loss_of

SIZES = GPTConfig(vocabulary=32, sequence=8, layers=2, hidden=16, heads=2, dropout=0.1)


def losses(comm: Communicator, layout: Layout, recipe: Recipe) -> list[float]:
    """Train two steps of plain gradient descent; return the losses that this rank computed."""
    mesh = Mesh(comm, layout)
    model = GPT(SIZES, torch.Generator().manual_seed(0), dtype=torch.float64)
    parallel = parallelize(model, mesh, recipe, loss_of(model, mesh), lambda x: x.new_empty(*x.shape, 16, dtype=torch.float64))
    optimizer = parallel.optimizer(torch.optim.SGD, parallel.model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        parts = [torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(part)) for part in range(recipe.microbatches)]
        parallel.zero_grad()
        where = [Where(0, step, 2 * part) for part in range(len(parts))]
        found.append(float(parallel.step(parts, parts, where)))
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(dp=2), {}),
        (Layout(dp=2), {"zero": 1, "recompute": "full"}),
        (Layout(dp=2), {"zero": 3, "recompute": "selective"}),
        (Layout(tp=2), {"sequence": True}),
        (Layout(pp=2), {"schedule": "zb-h1", "microbatches": 2}),
    ],
)
def test_parity(layout: Layout, options: dict[str, object]) -> None:
    plain = minidist.run(lambda comm: losses(comm, layout, Recipe(**options)), 2)
    compiled = minidist.run(lambda comm: losses(comm, layout, Recipe(**options, compile="aot_eager")), 2)
    assert compiled == [pytest.approx(found, rel=1e-9) for found in plain]
