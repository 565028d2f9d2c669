"""Training on any layout of threads, beside the serial run: what the tests of the mesh share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

import minidist
from minidist.comm import Communicator
from minidist.mesh import Layout, Mesh
from minidist.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.parallel.parallelize import parallelize
from minidist.parallel.recipe import Recipe
from minidist.parallel.sampler import share
from minidist.parallel.vocabulary import vocabulary_parallel_cross_entropy_sum

SMALL = GPTConfig(
    vocabulary=19, layers=4, hidden=16, heads=4, key_value_heads=2, intermediate=24, sequence=8, dropout=0.1, tied=True
)
PLAIN = Recipe()
FROZEN = "layers.1.mlp.up.weight"
LR, CLIP = 0.02, 0.5


@dataclass(frozen=True)
class Case:
    """One run: where, how, of what."""

    layout: Layout
    recipe: Recipe = PLAIN
    config: GPTConfig = SMALL
    batch: int = 11
    steps: int = 3
    dtype: torch.dtype = torch.float64


def build(config: GPTConfig, seed: int, dtype: torch.dtype) -> GPT:
    """Return a model with a frozen parameter."""
    model = GPT(config, torch.Generator().manual_seed(seed), dtype=dtype)
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


def tokens(case: Case, step: int) -> Tensor:
    """Return the global batch [B, T + 1] of a step, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, case.config.vocabulary, (case.batch, case.config.sequence + 1), generator=generator)


@cache
def serial(case: Case) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Return the parameters, losses and gradient norms of the run on one rank."""
    model, losses, norms = build(case.config, 0, case.dtype), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(case.steps):
        optimizer.zero_grad()
        whole = tokens(case, step)
        loss = cross_entropy_sum(model(whole[:, :-1], Where(7, step)), whole[:, 1:]) / whole[:, 1:].numel()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {name: p.detach() for name, p in model.named_parameters()}, losses, norms


def trained(comm: Communicator, case: Case) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Train as one rank; return the same, the parameters gathered."""
    mesh, config, recipe = Mesh(comm, case.layout), case.config, case.recipe
    count = case.batch * config.sequence

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if mesh.tp.size == 1:
            return cross_entropy_sum(logits, targets) / count
        return vocabulary_parallel_cross_entropy_sum(logits, targets, mesh.tp, config.vocabulary) / count

    def carried(inputs: Tensor) -> Tensor:
        time = inputs.shape[1] // (mesh.tp.size if recipe.sequence else 1)
        return torch.empty(len(inputs), time, config.hidden, dtype=case.dtype, device="meta")

    parallel = parallelize(build(config, comm.rank, case.dtype), mesh, recipe, loss, carried)
    optimizer = parallel.optimizer(torch.optim.AdamW, [{"params": list(parallel.model.parameters())}], lr=LR)
    microbatches = parallel.pipeline.plan.microbatches if parallel.pipeline else recipe.microbatches
    losses, norms = [], []
    for step in range(case.steps):
        parallel.zero_grad()
        rows = share(case.batch, mesh.dp.size, mesh.dp.rank)
        mine = tokens(case, step)[rows]
        cuts = [share(len(mine), microbatches, number) for number in range(microbatches)]
        where = [Where(7, step, rows.start + cut.start) for cut in cuts]
        total = parallel.step([mine[cut, :-1] for cut in cuts], [mine[cut, 1:] for cut in cuts], where)
        losses.append(sum(comm.roll_call(float(total) if mesh.tp.rank == 0 else 0.0)))
        norms.append(float(parallel.clip(CLIP)))
        optimizer.step()
    parallel.unwrap()
    names = GPT(config, torch.Generator(), dtype=case.dtype).named_parameters()
    return {name: value.clone() for name, value in parallel.whole_parameters(names)}, losses, norms


def worst(case: Case) -> float:
    """Return the largest max|a - b| / max|b| of parameters, losses and norms on any rank, against the serial run."""
    expected, losses, norms = serial(replace(case, layout=Layout(), recipe=Recipe()))
    numbers = torch.tensor([losses, norms])
    found = 0.0
    for parameters, *others in minidist.run(lambda comm: trained(comm, case), case.layout.size):
        assert parameters.keys() == expected.keys()
        pairs = [(parameters[name], exact) for name, exact in expected.items()] + [(torch.tensor(others), numbers)]
        found = max(found, *(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    return found
