"""Lesson 14: a mesh of ranks, what travels along each axis, and how to choose its shape.

    sizes = {"dp": 2, "pp": 2, "tp": 2}       outermost axis first: the last one, tp, has neighbouring ranks

              pp 0     pp 1
    dp 0     [0 1]    [2 3]                   a bracket is a tensor parallel group
    dp 1     [4 5]    [6 7]

Fill in the functions; their docstrings are the contract. `minidist.mesh` and what the package makes of it
(`minidist.parallel.parallelize`, DDP, tensor plans, clipping) are what you are building: calling them scores nothing.
What earlier lessons built is there: `all_reduce` (02), `copy_to` and `reduce_from` (tensor parallelism).

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 14             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import minidist
from minidist import Cluster, Communicator

# What an answer needs of earlier lessons:
#   all_reduce(x, comm)        replaces every rank's contiguous x by the sum, in place
#   copy_to(x, comm)           forward: x itself; backward: all-reduces the gradient. Enters a tensor parallel region
#   reduce_from(x, comm)       forward: all-reduces; backward: the gradient itself. Leaves the region
from minidist.collectives import all_reduce  # noqa: F401
from minidist.parallel.adjoint import copy_to, reduce_from  # noqa: F401

Array = np.ndarray[Any, Any]
Sizes = Mapping[str, int]
"""The size of each axis, outermost first. Any number of axes."""


@dataclass
class Gradient:
    """A gradient of a rank, complete over the data axis, and who else has the same one."""

    values: Array
    cut: bool  # the parameter is cut along tp: each tp rank has other elements. Else all tp ranks have the same
    tied: bool  # every stage of the pipeline has the same gradient. Else this stage alone has it


# ---------------------------------------------------------------- task 1: coordinates and groups


def coordinates(rank: int, sizes: Sizes) -> dict[str, int]:
    """Task 1: return where `rank` lies on every axis, such as {"dp": 1, "pp": 0, "tp": 1} for rank 5 above.

    Ranks count up along the last axis first, as the digits of a number do.
    """
    raise NotImplementedError("task 1 is not started")


def group(axis: str, rank: int, sizes: Sizes) -> list[int]:
    """Task 1: return the ranks that differ from `rank` along this axis only, itself included, in ascending order."""
    raise NotImplementedError("task 1 is not started")


def communicator(axis: str, comm: Communicator, sizes: Sizes) -> Communicator:
    """Task 1: return the communicator of this rank's group along an axis. All ranks of `comm` call it together.

    `comm.split(color)` divides the ranks of `comm` into one communicator for each color (a whole number), each with
    the ranks that passed it, in order. Call it once; nothing else may be sent.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: bytes along each axis


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
    """Task 2: return what one rank sends along each axis, {"dp": ..., "pp": ..., "tp": ...}, in one training step.

    Only the layers count: the embedding, the head and the loss are left out.

    Parameters
    ----------
    sizes : mapping
        Of dp, pp and tp. They divide whatever they cut: pp the layers, tp hidden and intermediate, and so on.
    stage : int
        Of the pipeline, that the rank is in; 0 is the first.
    layers, hidden, intermediate : int
        Of the whole model: L layers, of channels D, with F channels inside the MLP. A layer has attention (four
        matrices of D x D), an MLP (three matrices of D x F) and two norms of D weights each. tp cuts all the matrices;
        every tp rank has the norms whole. There are no biases.
    tokens : int
        In one microbatch of one data parallel rank, so an activation has tokens x D elements.
    microbatches : int
        In one step.
    itemsize : int
        Bytes of an element: of activations and gradients alike.

    What is sent
    ------------
    tp : for each layer and microbatch an all-reduce of one activation at four places: attention and MLP, in forward and
         in backward.
    pp : for each microbatch one activation to the next stage, if there is one, and one gradient of an activation to the
         stage before, if there is one.
    dp : one all-reduce, in each step, of the gradients of all parameters that this rank holds.
    All all-reduces are rings: among P ranks, 2 (P - 1)/P times the bytes of the buffer. The result is a whole number.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: a step on two axes


def train_step(
    blocks: Sequence[tuple[Tensor, Tensor]], x: Tensor, targets: Tensor, rate: float, dp: Communicator, tp: Communicator
) -> Tensor:
    """Task 3: take one step of gradient descent on a mesh of dp x tp, in place; return the mean loss, a scalar tensor.

    The serial model is `x = relu(x @ up) @ down` for each block; the loss is the mean of (x - target)^2 over all
    elements of the whole batch.

    Parameters
    ----------
    blocks : sequence of (up [D, F/tp], down [F/tp, D])
        This rank's columns of each `up` and its rows of each `down`. Replace the values (`up -= ...` inside
        `torch.no_grad()`, say) by those after the step, in which `rate` times the gradient is subtracted. They do not
        require gradients when you get them, and must not when you return.
    x, targets : Tensor [rows, D]
        Of this rank's place on the data axis: the same on all ranks of `tp`, others on the ranks of `dp`. Every rank
        of `dp` has as many rows.
    dp, tp : Communicator
        This rank's groups along the two axes.

    Returns
    -------
    The mean loss over the whole batch, before the step, the same on every rank.

    Messages
    --------
    Along tp, for each block: one all-reduce of [rows, D] in forward and one in backward, but in backward none for the
    first block, whose input needs no gradient. Along dp: the gradients of this rank's own blocks once, and one number
    for the loss. No more bytes than that on either axis (all-reduces as those of `all_reduce`), and none elsewhere.
    """
    raise NotImplementedError("task 3 is not started")


# ---------------------------------------------------------------- task 4: one norm for the whole mesh


def clip(gradients: Sequence[Gradient], limit: float, tp: Communicator, pp: Communicator) -> float:
    """Task 4: scale all gradients, in place, to a joint norm of at most `limit`; return the norm that they had before.

    The norm is that of the serial model's gradient: the square root of the sum of squares of all its elements, each
    counted once, whoever holds it and however many do.

    Parameters
    ----------
    gradients
        This rank's. Those of the data axis are the same already, so nothing needs to be sent there. A gradient that
        is not `cut` is the same on all ranks of `tp`; one that is `tied` is the same on all of `pp`; both can be.
    limit : float
        If the norm is larger, every gradient is multiplied by limit / (norm + 1e-6), as torch does.
    tp, pp : Communicator
        This rank's groups along the other two axes.

    Messages
    --------
    An all-reduce of one float64 along tp, and one along pp. No gradients.
    """
    raise NotImplementedError("task 4 is not started")


# ---------------------------------------------------------------- task 5: which layout?


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
    """Task 5: return the seconds of a step for every layout (dp, pp, tp) of so many ranks that fits.

    A layout (dp outermost, tp innermost) is possible if dp * pp * tp = ranks, pp divides the layers, tp divides the
    heads, and dp divides the sequences of a batch. (What tp divides the heads of, it divides `intermediate` of, too.)
    Microbatches have one sequence: there are m = sequences / dp of them.

    Bytes that a GPU of the first stage holds, which must be at most `memory`:
        16 N / (pp tp)                              of the layers' matrices, N = layers (4 D^2 + 3 D F): parameters,
                                                    gradients and AdamW's state in mixed precision
        min(pp, m) (layers / pp) 34 sequence D / tp activations of the microbatches under way (1F1B)

    Seconds of a step:
        (compute + tp) (m + pp - 1) / m + pp + dp   the bubble stretches what each microbatch does
        compute                                     6 N sequence sequences / (ranks flops)
        tp, pp, dp                                  bytes along that axis / bandwidth of its link

    Bytes are those of task 2 with itemsize 2, of the stage that sends most. The link of an axis is `cluster.inside` if
    each group along it lies within one node, else `cluster.across`, since a ring is as slow as its slowest link. Use
    `cluster.node_of(rank)` and `link.bandwidth` (bytes per second); latency is left out.
    """
    raise NotImplementedError("task 5 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    tp_size = 2 if comm.size % 2 == 0 else 1
    sizes = {"dp": comm.size // tp_size, "pp": 1, "tp": tp_size}
    alone = comm.split(comm.rank)

    def task_1() -> str:
        groups = [group(axis, comm.rank, sizes) for axis in sizes]
        members = [communicator(axis, comm, sizes).members for axis in sizes]
        return f"{coordinates(comm.rank, sizes)}: groups {groups}, communicators of {members}"

    def task_2() -> str:
        mesh = {"dp": 2, "pp": 3, "tp": 2}
        return str(bytes_per_step(mesh, 1, layers=6, hidden=16, intermediate=32, tokens=8, microbatches=3, itemsize=8))

    def task_3() -> str:
        draw = torch.Generator().manual_seed(comm.rank)
        blocks = [(torch.ones(4, 2, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64) / 8) for _ in range(2)]
        x = torch.rand(3, 4, dtype=torch.float64, generator=draw)
        return f"the loss is {train_step(blocks, x, x, 0.01, comm, alone):.6f}, data parallel over all ranks"

    def task_4() -> str:
        gradients = [Gradient(np.ones(3), cut=True, tied=False), Gradient(np.ones(2), cut=False, tied=False)]
        return f"the norm is {clip(gradients, 1.0, comm, alone):.6f}, tensor parallel over all ranks"

    def task_5() -> str:
        model = {"layers": 32, "hidden": 4096, "intermediate": 11008, "heads": 32}
        found = layouts_that_fit(
            64, Cluster.h100(nodes=8), **model, sequence=4096, sequences=256, memory=75e9, flops=400e12
        )
        best = min(found, key=lambda layout: found[layout])
        return f"{len(found)} layouts fit; the fastest is {best}, {found[best]:.3f} s a step"

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
