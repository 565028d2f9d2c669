"""Lesson 14 answered by hand, from the handout alone: coordinates, bytes, a step on two axes, a
norm, and layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minidist import Cluster, Communicator
from minidist.full.adjoint import copy_to, reduce_from
from minidist.full.collectives import all_reduce

Array = np.ndarray[Any, Any]
Sizes = Mapping[str, int]
"""The size of each axis, outermost first."""


@dataclass
class Gradient:
    """A gradient of a rank, complete over the data axis, and who else has the same one."""

    values: Array
    cut: bool  # along tp: each tp rank has other elements
    tied: bool  # every stage has the same gradient


def coordinates(rank: int, sizes: Sizes) -> dict[str, int]:
    """Task 1: return where `rank` lies on every axis."""
    places = {}
    for axis, size in reversed(sizes.items()):
        rank, places[axis] = divmod(rank, size)
    return {axis: places[axis] for axis in sizes}


def group(axis: str, rank: int, sizes: Sizes) -> list[int]:
    """Task 1: return the ranks that differ from `rank` along this axis only, in ascending order."""
    axes = list(sizes)
    stride = math.prod(sizes[inner] for inner in axes[axes.index(axis) + 1 :])
    first = rank - stride * coordinates(rank, sizes)[axis]
    return [first + stride * place for place in range(sizes[axis])]


def communicator(axis: str, comm: Communicator, sizes: Sizes) -> Communicator:
    """Task 1: return the communicator of this rank's group along an axis."""
    return comm.split(group(axis, comm.rank, sizes)[0])


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
    """Task 2: return what one rank sends along each axis in one training step."""
    dp, pp, tp = sizes["dp"], sizes["pp"], sizes["tp"]
    own_layers = layers // pp
    activation = tokens * hidden * itemsize
    matrices = 4 * hidden * hidden + 3 * hidden * intermediate
    gradients = own_layers * (matrices // tp + 2 * hidden) * itemsize
    neighbours = (stage > 0) + (stage < pp - 1)
    return {
        "dp": 2 * (dp - 1) * gradients // dp,
        "pp": microbatches * neighbours * activation,
        "tp": 2 * (tp - 1) * activation * 4 * microbatches * own_layers // tp,
    }


def train_step(
    blocks: Sequence[tuple[Tensor, Tensor]],
    x: Tensor,
    targets: Tensor,
    rate: float,
    dp: Communicator,
    tp: Communicator,
) -> Tensor:
    """Task 3: take one step of gradient descent on a mesh of dp x tp; return the mean loss."""
    # the same storage
    leaves = [(up.detach().requires_grad_(), down.detach().requires_grad_()) for up, down in blocks]
    for up, down in leaves:
        x = reduce_from(torch.relu(copy_to(x, tp) @ up) @ down, tp)
    loss = (x - targets).square().sum() / (targets.numel() * dp.size)
    weights = [weight for block in leaves for weight in block]
    gradients = torch.autograd.grad(loss, weights)

    buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])
    all_reduce(buffer, dp)
    sums = buffer.split([weight.numel() for weight in weights])
    with torch.no_grad():
        for weight, gradient in zip(weights, sums, strict=True):
            weight -= rate * gradient.view_as(weight)

    total = loss.detach().reshape(1)
    all_reduce(total, dp)
    return total[0]


def clip(gradients: Sequence[Gradient], limit: float, tp: Communicator, pp: Communicator) -> float:
    """Task 4: scale all gradients to a joint norm of at most `limit`; return the norm before."""
    square = np.zeros(1)
    for gradient in gradients:
        counts = (gradient.cut or tp.rank == 0) and (not gradient.tied or pp.rank == 0)
        if counts:
            square += np.square(gradient.values.astype(np.float64)).sum()
    all_reduce(square, tp)
    all_reduce(square, pp)
    norm = math.sqrt(square[0])
    if norm > limit:
        for gradient in gradients:
            gradient.values *= limit / (norm + 1e-6)
    return norm


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
    """Task 5: return the seconds of a step for every layout (dp, pp, tp) that fits."""
    weights = layers * (4 * hidden * hidden + 3 * hidden * intermediate)
    compute = 6 * weights * sequence * sequences / (ranks * flops)
    found = {}
    for dp, pp, tp in _possible(ranks, layers, heads, sequences):
        m = sequences // dp
        sizes = {"dp": dp, "pp": pp, "tp": tp}
        held = 16 * weights / (pp * tp) + min(pp, m) * layers / pp * 34 * sequence * hidden / tp
        if held > memory:
            continue
        stages = [
            bytes_per_step(
                sizes,
                stage,
                layers=layers,
                hidden=hidden,
                intermediate=intermediate,
                tokens=sequence,
                microbatches=m,
                itemsize=2,
            )
            for stage in range(pp)
        ]
        seconds = {
            axis: max(sent[axis] for sent in stages) / _bandwidth(axis, ranks, sizes, cluster)
            for axis in sizes
        }
        found[dp, pp, tp] = (
            (compute + seconds["tp"]) * (m + pp - 1) / m + seconds["pp"] + seconds["dp"]
        )
    return found


def _possible(ranks: int, layers: int, heads: int, sequences: int) -> list[tuple[int, int, int]]:
    """Return every (dp, pp, tp) of so many ranks that divides what it cuts."""
    return [
        (ranks // (pp * tp), pp, tp)
        for pp in range(1, ranks + 1)
        for tp in range(1, ranks // pp + 1)
        if ranks % (pp * tp) == 0
        and layers % pp == 0
        and heads % tp == 0
        and sequences % (ranks // (pp * tp)) == 0
    ]


def _bandwidth(axis: str, ranks: int, sizes: Sizes, cluster: Cluster) -> float:
    """Return the bandwidth of the slowest link that a group along the axis runs over."""
    for rank in range(ranks):
        nodes = {cluster.node_of(member) for member in group(axis, rank, sizes)}
        if len(nodes) > 1:
            return cluster.across.bandwidth
    return cluster.inside.bandwidth
