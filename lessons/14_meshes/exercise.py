"""Lesson 14: a mesh of ranks, what travels along each axis, and how to choose its shape.

    sizes = {"dp": 2, "pp": 2, "tp": 2}       outermost axis first; groups along the last, tp, have neighbouring ranks

              pp 0     pp 1
    dp 0     [0 1]    [2 3]                   a bracket is a tensor parallel group
    dp 1     [4 5]    [6 7]

Fill in the functions; their docstrings are the contract. You are building what `minidist.full.mesh` does
and the parts of the package that use it (`minidist.full.apply`, DDP, tensor plans,
clipping), so calling these scores nothing. You may use functions of earlier lessons: `all_reduce`
(lesson 02), `copy_to` and `reduce_from` (lesson 07).

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
from minidist.full.adjoint import copy_to, reduce_from  # noqa: F401

# The functions of earlier lessons that an answer needs:
#   all_reduce(x, comm)        replaces every rank's contiguous x by the sum, in place
#   copy_to(x, comm)           enters a tensor-parallel region. Forward: x itself; backward: all-reduces the gradient
#   reduce_from(x, comm)       leaves the region. Forward: all-reduces x; backward: the gradient itself
from minidist.full.collectives import all_reduce  # noqa: F401

Array = np.ndarray[Any, Any]
Sizes = Mapping[str, int]
"""The size of each axis, outermost first. Any number of axes."""


@dataclass
class Gradient:
    """A gradient of a rank, already summed over the data axis, and which other ranks have the same
    one.
    """

    values: Array
    # True: cut along tp, so each tp rank has other elements. False: all tp ranks have the same
    # gradient
    cut: bool
    # True: every stage of the pipeline has the same gradient. False: only this stage has it
    tied: bool


# ---------------------------------------------------------------- task 1: coordinates and groups


def coordinates(rank: int, sizes: Sizes) -> dict[str, int]:
    """Task 1: return the coordinate of `rank` on every axis: {"dp": 1, "pp": 0, "tp": 1} for rank 5
    above.

    The coordinate on the last axis changes fastest from rank to rank, like the last digit of a
    number.
    """
    raise NotImplementedError("task 1 is not started")


def group(axis: str, rank: int, sizes: Sizes) -> list[int]:
    """Task 1: return `rank` and the ranks that differ from it on this axis only, in ascending
    order.
    """
    raise NotImplementedError("task 1 is not started")


def communicator(axis: str, comm: Communicator, sizes: Sizes) -> Communicator:
    """Task 1: return the communicator of this rank's group along an axis. All ranks of `comm` call
    this together.

    `comm.split(color)` divides the ranks of `comm` by color (a whole number). It returns the
    communicator of the ranks that passed the same color, in order. Call it once, and send nothing
    else.
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
    """Task 2: return the bytes that one rank sends in a training step, {"dp": ..., "pp": ..., "tp":
    ...}.

    Count only the layers; leave out the embedding, the head and the loss.

    Parameters
    ----------
    sizes : mapping
        The sizes of dp, pp and tp. They divide what they cut: pp divides the number of layers, tp
        divides hidden and intermediate.
    stage : int
        The pipeline stage of the rank; 0 is the first.
    layers, hidden, intermediate : int
        Of the whole model: L layers with D channels, and F channels inside the MLP. A layer has
        attention (four matrices of D x D), an MLP (three matrices of D x F) and two norms of D
        weights each. tp cuts all matrices; every tp rank has the whole norms. There are no biases.
    tokens : int
        The tokens of one microbatch on one data rank, so an activation has tokens x D elements.
    microbatches : int
        The number of microbatches in a step, on one data rank.
    itemsize : int
        The bytes of one element, of activations and of gradients.

    What is sent
    ------------
    tp : for each layer and microbatch four all-reduces of one activation: for attention and for the
        MLP, each in forward and in backward.
    pp : for each microbatch one activation to the next stage, if there is one, and one gradient of
        an activation to the stage before, if there is one.
    dp : one all-reduce in each step, of the gradients of all parameters that this rank holds.

    All all-reduces are rings: with P ranks, each rank sends 2 (P - 1)/P times the bytes of the
    buffer. The three numbers are whole numbers.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: a step on two axes


def train_step(
    blocks: Sequence[tuple[Tensor, Tensor]],
    x: Tensor,
    targets: Tensor,
    rate: float,
    dp: Communicator,
    tp: Communicator,
) -> Tensor:
    """Task 3: take one step of gradient descent on a mesh of dp x tp, in place; return the mean
    loss, a scalar tensor.

    The serial model is `x = relu(x @ up) @ down` for each block; the loss is the mean of (x -
    target)^2 over all elements of the whole batch.

    Parameters
    ----------
    blocks : sequence of (up [D, F/tp], down [F/tp, D])
        This rank's columns of each `up` and its rows of each `down`. Subtract `rate` times the
        gradient from them, in place (for example `up -= ...` inside `torch.no_grad()`). They do not
        require gradients at the call, and must not require them when you return.
    x, targets : Tensor [rows, D]
        This rank's part of the batch: the same on all ranks of `tp`, different on the ranks of
        `dp`. Every rank has the same number of rows.
    dp, tp : Communicator
        This rank's groups along the two axes.

    Returns
    -------
    The mean loss over the whole batch, before the step, the same on every rank.

    Messages
    --------
    Along tp, for each block: one all-reduce of [rows, D] in forward and one in backward. The first
    block has none in backward, because its input needs no gradient. Along dp: all-reduces of the
    gradients of this rank's own blocks, once, and of one number for the loss. Send no more bytes
    than `all_reduce` sends for these, and nothing elsewhere.
    """
    raise NotImplementedError("task 3 is not started")


# ---------------------------------------------------------------- task 4: one norm for the whole mesh


def clip(gradients: Sequence[Gradient], limit: float, tp: Communicator, pp: Communicator) -> float:
    """Task 4: scale all gradients in place to a joint norm of at most `limit`; return the norm
    before scaling.

    The norm is that of the serial model's gradient: the square root of the sum of the squares of
    all its elements. Count each element once, however many ranks hold it.

    Parameters
    ----------
    gradients
        This rank's gradients. They are already the same along the data axis, so send nothing there.
        A gradient that is not `cut` is the same on all ranks of `tp`. A gradient that is `tied` is
        the same on all ranks of `pp`. Both can be true of one gradient.
    limit : float
        If the norm is larger, multiply every gradient by limit / (norm + 1e-6), as torch does.
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
    """Task 5: return {(dp, pp, tp): seconds of a step} for every layout of `ranks` ranks that is
    possible and fits.

    A layout (dp outermost, tp innermost) is possible if dp * pp * tp = ranks, pp divides the
    layers, tp divides the heads, and dp divides the sequences of a batch. (If tp divides the heads,
    it divides `intermediate`, too.) A microbatch has one sequence, so there are m = sequences / dp
    of them.

    A layout fits if a GPU of the first stage holds at most `memory` bytes. It holds the sum of
        16 N / (pp tp)                              of the layers' matrices, N = layers (4 D^2 + 3 D F): parameters,
                                                    gradients and AdamW's state in mixed precision
        min(pp, m) (layers / pp) 34 sequence D / tp activations of the microbatches under way (1F1B)

    Seconds of a step:
        (compute + tp) (m + pp - 1) / m + pp + dp   the bubble makes compute and tp longer
        compute                                     6 N sequence sequences / (ranks flops)
        tp, pp, dp                                  bytes along that axis / bandwidth of its link

    The bytes are those of task 2 with itemsize 2, for the stage that sends most. The link of an
    axis is `cluster.inside` if each group along this axis lies within one node, else
    `cluster.across`: a ring is as slow as its slowest link. Use `cluster.node_of(rank)` and
    `link.bandwidth` (bytes per second); leave out the latency.
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
        return str(
            bytes_per_step(
                mesh, 1, layers=6, hidden=16, intermediate=32, tokens=8, microbatches=3, itemsize=8
            )
        )

    def task_3() -> str:
        draw = torch.Generator().manual_seed(comm.rank)
        blocks = [
            (torch.ones(4, 2, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64) / 8)
            for _ in range(2)
        ]
        x = torch.rand(3, 4, dtype=torch.float64, generator=draw)
        return (
            f"the loss is {train_step(blocks, x, x, 0.01, comm, alone):.6f}, data parallel over "
            "all ranks"
        )

    def task_4() -> str:
        gradients = [
            Gradient(np.ones(3), cut=True, tied=False),
            Gradient(np.ones(2), cut=False, tied=False),
        ]
        return (
            f"the norm is {clip(gradients, 1.0, comm, alone):.6f}, tensor parallel over all ranks"
        )

    def task_5() -> str:
        model = {"layers": 32, "hidden": 4096, "intermediate": 11008, "heads": 32}
        found = layouts_that_fit(
            64,
            Cluster.h100(nodes=8),
            **model,
            sequence=4096,
            sequences=256,
            memory=75e9,
            flops=400e12,
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
