"""Lesson 14, solved: the package's mesh, its adjoint pairs and its clipping. Start in
`minidist/full/mesh.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist import Cluster, Communicator, Layout
from minidist.full.adjoint import copy_to, reduce_from
from minidist.full.clip import clip_by_global_norm
from minidist.full.collectives import all_reduce
from minidist.full.placement import Block, Tie, record

Sizes = Mapping[str, int]


def coordinates(rank: int, sizes: Sizes) -> dict[str, int]:
    """Ask the layout, which knows two axes more."""
    place = Layout(**sizes).coordinate(rank)
    return {axis: place[axis] for axis in sizes}


def group(axis: str, rank: int, sizes: Sizes) -> list[int]:
    """Slice the array of ranks."""
    return list(Layout(**sizes).group(axis, rank))


def communicator(axis: str, comm: Communicator, sizes: Sizes) -> Communicator:
    """Split by the first rank of each group; a mesh splits for every axis, so this is `Mesh.over`
    alone.
    """
    return comm.split(color=Layout(**sizes).group(axis, comm.rank)[0])


def bytes_per_step(
    sizes: Sizes,
    stage: int,
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    tokens: int,
    microbatches: int,
    itemsize: int,
) -> dict[str, int]:
    """Activations along tp and pp, gradients along dp."""
    dp, pp, tp = (sizes[axis] for axis in ("dp", "pp", "tp"))
    activation, mine = tokens * hidden * itemsize, layers // pp
    held = mine * ((4 * hidden**2 + 3 * hidden * intermediate) // tp + 2 * hidden)
    neighbours = (stage > 0) + (stage < pp - 1)
    return {
        "dp": 2 * (dp - 1) * held * itemsize // dp,
        "pp": neighbours * microbatches * activation,
        "tp": 4 * mine * microbatches * 2 * (tp - 1) * activation // tp,
    }


def train_step(
    blocks: Sequence[tuple[Tensor, Tensor]],
    x: Tensor,
    targets: Tensor,
    rate: float,
    dp: Communicator,
    tp: Communicator,
) -> Tensor:
    """Each axis does its own: tp inside the blocks, dp once behind backward."""
    parameters = [parameter for block in blocks for parameter in block]
    for parameter in parameters:
        parameter.requires_grad_()
    for up, down in blocks:
        x = reduce_from(torch.relu(copy_to(x, tp) @ up) @ down, tp)
    loss = (x - targets).square().mean() / dp.size
    gradients = torch.autograd.grad(loss, parameters)
    total = loss.detach()
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    all_reduce(bucket, dp)
    all_reduce(total, dp)
    pieces = bucket.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.requires_grad_(False)
        parameter -= rate * piece.view_as(parameter)
    return total


def clip(gradients: Sequence[Any], limit: float, tp: Communicator, pp: Communicator) -> float:
    """Write down who holds what, as tensor parallelism and the pipeline do, and let the package
    clip.
    """
    parameters = []
    for number, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.empty(gradient.values.shape, dtype=torch.float64))
        parameter.grad = torch.from_numpy(gradient.values)
        copies = 1 if gradient.cut else tp.size
        record(parameter, block=Block(f"{number}", parameter.shape, None, (), copies, tp))
        if gradient.tied:
            record(parameter, tie=Tie(f"{number}", pp))
        parameters.append(parameter)
    return float(clip_by_global_norm(parameters, limit, tp, pp))


def layouts_that_fit(
    ranks: int,
    cluster: Cluster,
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    sequence: int,
    sequences: int,
    memory: float,
    flops: float,
) -> dict[tuple[int, int, int], float]:
    """Try all of them."""
    parameters = layers * (4 * hidden**2 + 3 * hidden * intermediate)
    compute = 6 * parameters * sequence * sequences / (ranks * flops)
    found = {}
    for pp, tp in ((pp, tp) for pp in range(1, ranks + 1) for tp in range(1, ranks + 1)):
        dp = ranks // (pp * tp)
        if dp * pp * tp != ranks or layers % pp or heads % tp or sequences % dp:
            continue
        m, sizes = sequences // dp, {"dp": dp, "pp": pp, "tp": tp}
        activations = min(pp, m) * (layers // pp) * 34 * sequence * hidden / tp
        if 16 * parameters / (pp * tp) + activations > memory:
            continue
        sent = bytes_per_step(
            sizes,
            stage=1 if pp > 2 else 0,
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            tokens=sequence,
            microbatches=m,
            itemsize=2,
        )
        links = Layout(**sizes).links(cluster)
        bandwidth = {
            axis: (cluster.inside if links[axis] == "inside" else cluster.across).bandwidth
            for axis in sizes
        }
        seconds = {axis: sent[axis] / bandwidth[axis] for axis in sizes}
        stretched = (compute + seconds["tp"]) * (m + pp - 1) / m
        found[dp, pp, tp] = math.fsum((stretched, seconds["pp"], seconds["dp"]))
    return found
