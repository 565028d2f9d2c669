"""Collectives that autograd can differentiate: adjoint pairs, in which each one's backward is the
other's forward.

    forward                                    backward               Megatron's name
    copy_to         every rank goes on with x  reduce_from            f: enter a tensor-parallel region
    reduce_from     the sum of all ranks' x    copy_to                g: leave it
    scatter_to      this rank's slice of x     gather_from            enter a region that splits a dim
    gather_from     all ranks' slices          scatter_to             leave it
    all_gather      all ranks' slices          reduce_scatter         ḡ of sequence parallelism
    reduce_scatter  a slice of the sum         all_gather             its adjoint
    all_to_all      chunk j goes to rank j     all_to_all, back

Why are there two ways to gather? A *replicated* tensor is one variable of which every rank keeps a
copy, and the gradient of every copy is the whole gradient. `gather_from` returns a replicated
tensor, so in backward each rank just takes its slice of the gradient. After `all_gather` each rank
computes something else with its copy, so each has one term of the gradient, and backward must sum
the terms. If you mix them up, gradients are wrong by a factor of P, or lack all terms but one.

Each function takes the communicator and leaves its input unchanged. All ranks must call the same
functions in the same order, in backward, too; they do if every rank builds the same graph. Backward
calls the functions of this file, so it can be differentiated again. On one rank each returns `x`
itself. All raise as the collective that they call.

Cost: that of the collective; `copy_to` and `scatter_to` send nothing. A dim other than the first,
or a tensor that is not contiguous, costs a copy.

Sources: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4.2.2.
"""

from collections.abc import (
    Callable,
    Sequence,
)
from typing import Any, TypeAlias

import torch
from torch import Tensor

import minidist.full.collectives as collectives
from minidist.full.collectives.fast import cut
from minidist.full.comm import Communicator

Map: TypeAlias = Callable[[Tensor], Tensor]
Counts: TypeAlias = Sequence[int] | None


class Linear(torch.autograd.Function):
    """A linear map, whose backward is its adjoint.

    Collectives are linear in what the ranks bring.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, adjoint: Map) -> Tensor:
        """Apply the map."""
        ctx.adjoint = adjoint
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Apply the adjoint."""
        return ctx.adjoint(gradient), None, None


def copy_to(x: Tensor, comm: Communicator) -> Tensor:
    """Return the replicated `x`, with which each rank computes its part; backward sums gradients
    (Megatron's f).
    """
    return _linear(x, comm, lambda x: x.view_as(x), lambda gradient: reduce_from(gradient, comm))


def reduce_from(x: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of all ranks' `x`, replicated; backward hands the gradient to each term
    (Megatron's g).
    """

    def forward(x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(total, comm)
        return total

    return _linear(x, comm, forward, lambda gradient: copy_to(gradient, comm))


def scatter_to(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """Return this rank's slice of the replicated `x` [..., n, ...]: `numpy.array_split`'s, along
    `dim`. No message.
    """
    size = x.shape[dim]

    def forward(x: Tensor) -> Tensor:
        return torch.split(x, cut(size, comm.size), dim)[comm.rank].clone(
            memory_format=torch.contiguous_format
        )

    return _linear(x, comm, forward, lambda gradient: gather_from(gradient, comm, dim, size))


def gather_from(x: Tensor, comm: Communicator, dim: int, size: int) -> Tensor:
    """Return all ranks' slices along `dim`, replicated.

    `size` is that of the whole dim, cut as by `scatter_to`.
    """
    return _linear(
        x,
        comm,
        lambda x: _gathered(x, comm, dim, size),
        lambda gradient: scatter_to(gradient, comm, dim),
    )


def all_gather(x: Tensor, comm: Communicator, dim: int, size: int) -> Tensor:
    """Return all ranks' slices along `dim`, of `size` together, with which each rank computes its
    own part.
    """
    return _linear(
        x,
        comm,
        lambda x: _gathered(x, comm, dim, size),
        lambda gradient: reduce_scatter(gradient, comm, dim),
    )


def reduce_scatter(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """Return this rank's slice, along `dim`, of the sum of all ranks' `x`."""
    size = x.shape[dim]

    def forward(x: Tensor) -> Tensor:
        return (
            collectives.reduce_scatter(x.movedim(dim, 0).contiguous(), comm)
            .movedim(0, dim)
            .contiguous()
        )

    return _linear(x, comm, forward, lambda gradient: all_gather(gradient, comm, dim, size))


def all_to_all(
    x: Tensor, comm: Communicator, send_counts: Counts = None, receive_counts: Counts = None
) -> Tensor:
    """Send chunk j of the rows of `x` [n, ...] to rank j.

    Return the chunks that came, by sender [m, ...].

    Without counts the chunks are `numpy.array_split`'s and n is the same on all ranks; see
    `collectives.all_to_all`.
    """
    leaving = cut(x.shape[0], comm.size) if send_counts is None else list(send_counts)
    if send_counts is None:
        receive_counts = [leaving[comm.rank]] * comm.size
    arriving = (
        [counts[comm.rank] for counts in comm.all_gather_object(leaving)]
        if receive_counts is None
        else receive_counts
    )

    def forward(x: Tensor) -> Tensor:
        return collectives.all_to_all(x.contiguous(), comm, "auto", leaving, arriving)

    return _linear(x, comm, forward, lambda gradient: all_to_all(gradient, comm, arriving, leaving))


def _linear(x: Tensor, comm: Communicator, forward: Map, adjoint: Map) -> Tensor:
    """Return what a map makes of `x`; on one rank `x` itself."""
    return x if comm.size == 1 else Linear.apply(x, forward, adjoint)  # type: ignore[no-untyped-call]


def _gathered(x: Tensor, comm: Communicator, dim: int, size: int) -> Tensor:
    shards = collectives.all_gather(
        x.movedim(dim, 0).contiguous(), comm, counts=cut(size, comm.size)
    )
    return shards.movedim(0, dim).contiguous()
