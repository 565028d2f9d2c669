"""Training on any layout of threads, beside the serial run: what the tests of the mesh share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import minidist
from minidist.full.comm import Communicator
from minidist.full.context.order import positions
from minidist.full.ddp.sampler import share
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.model.moe.balance import rebalance
from minidist.full.precision.fp8 import to_fp8, update_scales
from minidist.full.precision.fp8_experts import experts_to_fp8
from minidist.full.strategy import Parallel
from minidist.full.tensor.vocabulary import vocabulary_parallel_cross_entropy_sum
from minidist.further import Recipe, parallelize
from minidist.further.nf4.strategy import QuantizedAdapters

SMALL = GPTConfig(
    vocabulary=19,
    layers=4,
    hidden=16,
    heads=4,
    key_value_heads=2,
    intermediate=24,
    sequence=8,
    dropout=0.1,
    tied=True,
)
PLAIN = Recipe()
FROZEN = "layers.1.mlp.up.weight"
LR, CLIP = 0.02, 0.5

Outcome = tuple[dict[str, Tensor], list[float], list[float]]
"""Parameters, losses and norms of the gradients."""


@dataclass(frozen=True)
class Case:
    """One run: where, how, of what. `frozen` are beginnings of names; `costs` are those of the
    layers, for the cut.
    """

    layout: Layout
    recipe: Recipe = PLAIN
    config: GPTConfig = SMALL
    batch: int = 11
    steps: int = 2
    dtype: torch.dtype = torch.float64
    frozen: tuple[str, ...] = (FROZEN,)
    costs: tuple[float, ...] | None = None

    def alone(self, dtype: torch.dtype) -> Case:
        """Return the serial run of this one, in a precision; float64 is exact, whatever the case
        multiplies in.
        """
        fp8 = self.recipe.fp8 and dtype != torch.float64
        recipe = Recipe(lora=self.recipe.lora, qlora=self.recipe.qlora, fp8=fp8)
        return replace(self, layout=Layout(), recipe=recipe, costs=None, dtype=dtype)


class TakeGradient(torch.optim.Optimizer):
    """Makes each parameter its gradient, so that whatever gathers parameters gathers gradients."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.copy_(parameter.grad)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all runs."""
    return torch.optim.AdamW(params, lr=LR)


def build(
    config: GPTConfig, seed: int, dtype: torch.dtype, frozen: tuple[str, ...] = (FROZEN,)
) -> GPT:
    """Return a model with frozen parameters."""
    model = GPT(config, torch.Generator().manual_seed(seed), dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    return model


def tokens(case: Case, step: int) -> Tensor:
    """Return the global batch [B, T + 1] of a step, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(
        0, case.config.vocabulary, (case.batch, case.config.sequence + 1), generator=generator
    )


@cache
def serial(case: Case, kind: Callable[..., Any] = adamw) -> Outcome:
    """Return what comes of the run on one rank."""
    model, losses, norms = build(case.config, 0, case.dtype, case.frozen), [], []
    if case.recipe.lora:
        QuantizedAdapters().extend(model, case.recipe)
    if case.recipe.fp8:
        to_fp8(model)
        experts_to_fp8(model)
    optimizer = kind(model.parameters())
    for step in range(case.steps):
        optimizer.zero_grad()
        whole = tokens(case, step)
        count = whole[:, 1:].numel()
        loss = (
            cross_entropy_sum(model(whole[:, :-1], Where(7, step, weight=1 / count)), whole[:, 1:])
            / count
        )
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        update_scales(model)
        rebalance(model)
        losses.append(float(loss.detach()))
    return {name: p.detach() for name, p in model.named_parameters()}, losses, norms


def spread(comm: Communicator, case: Case) -> Parallel:
    """Return one rank's part of the model, which every rank has built with other values."""
    mesh, config, recipe = Mesh(comm, case.layout), case.config, case.recipe
    count = case.batch * config.sequence

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if mesh.tp.size == 1:
            return cross_entropy_sum(logits, targets) / count
        return (
            vocabulary_parallel_cross_entropy_sum(logits, targets, mesh.tp, config.vocabulary)
            / count
        )

    def carried(inputs: Tensor) -> Tensor:
        time = inputs.shape[1] // (mesh.tp.size if recipe.sp else 1)
        return torch.empty(len(inputs), time, config.hidden, dtype=case.dtype, device="meta")

    model = build(config, comm.rank, case.dtype, case.frozen)
    return parallelize(model, mesh, replace(recipe, costs=case.costs), loss, carried)


def one_step(parallel: Parallel, case: Case, step: int, scale: float = 1.0) -> float:
    """Run forward and backward of a step; return the sum of the losses that this rank has computed.

    The `scale` is that of the losses of layers alone.
    """
    mesh = parallel.mesh
    microbatches = parallel.recipe.microbatches
    rows = share(case.batch, mesh.dp.size, mesh.dp.rank)
    mine = tokens(case, step)[rows]
    cuts = [share(len(mine), microbatches, number) for number in range(microbatches)]
    columns = positions(case.recipe.cp_order, mesh.cp.size, mesh.cp.rank, case.config.sequence)
    weight = scale / (case.batch * case.config.sequence)
    where = [Where(7, step, rows.start + cut.start, columns, weight) for cut in cuts]
    inputs, targets = mine[:, columns], mine[:, columns + 1]
    return float(
        parallel.step([inputs[cut] for cut in cuts], [targets[cut] for cut in cuts], where)
    )


def trained(comm: Communicator, case: Case, kind: Callable[..., Any] = adamw) -> Outcome:
    """Train as one rank; return the same as `serial`, the parameters gathered."""
    parallel = spread(comm, case)
    optimizer = parallel.optimizer(kind, [{"params": list(parallel.model.parameters())}])
    losses, norms = [], []
    for step in range(case.steps):
        parallel.zero_grad()
        total = one_step(parallel, case, step)
        same = parallel.mesh.tp.all_gather_object(total)
        assert len(set(same)) == 1, f"ranks of one tensor axis found losses {same}"
        losses.append(sum(comm.all_gather_object(total if parallel.mesh.tp.rank == 0 else 0.0)))
        norms.append(float(parallel.clip(CLIP)))
        optimizer.step()
    parallel.unwrap()
    shapes = GPT(case.config, dtype=case.dtype, device="meta")
    if case.recipe.lora:
        QuantizedAdapters().extend(shapes, case.recipe)
    whole = parallel.whole_parameters(shapes.named_parameters())
    return {name: value.clone() for name, value in whole}, losses, norms


def worst(case: Case, kind: Callable[..., Any] = adamw) -> float:
    """Return the largest max|a - b| / max|b| of parameters, losses and norms on any rank, against
    the serial run.
    """
    exact, *numbers = serial(case.alone(torch.float64), kind)
    found = []
    for parameters, *others in minidist.run(
        lambda comm: trained(comm, case, kind), case.layout.size
    ):
        assert parameters.keys() == exact.keys()
        found += [difference(parameters[name], exact[name]) for name in exact]
        found += [
            difference(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
            for a, b in zip(others, numbers, strict=True)
        ]
    return max(found)


def difference(a: Tensor, b: Tensor) -> float:
    """Return max|a - b| / max|b|; NaN anywhere is an infinite difference."""
    a, b = a.double(), b.double()  # codes of 4 bits, too
    found = float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))
    return found if found == found else float("inf")


def distances(case: Case) -> tuple[float, float]:
    """Return how far the gradients of one step lie from the serial ones in float64, relative to
    these.

    Of the rank that is furthest, and of the serial run in the precision of the case.
    """
    case = replace(case, steps=1)
    exact = serial(case.alone(torch.float64), TakeGradient)[0]
    ranks = minidist.run(lambda comm: trained(comm, case, TakeGradient)[0], case.layout.size)
    same = serial(case.alone(case.dtype), TakeGradient)[0]

    def distance(ours: dict[str, Tensor]) -> float:
        assert ours.keys() == exact.keys()
        names = [name for name in exact if not name.startswith(case.frozen)]
        if case.recipe.lora:
            names = [name for name in exact if name.endswith((".A", ".B"))]
        apart = torch.stack([(ours[name].double() - exact[name]).norm() for name in names]).norm()
        found = float(apart / torch.stack([exact[name].norm() for name in names]).norm())
        return found if found == found else float("inf")

    return max(map(distance, ranks)), distance(same)
