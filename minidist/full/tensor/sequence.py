"""Sequence parallelism: what is between the tensor-parallel regions is split along the sequence.

    tensor parallel     x [B, T, D] on every rank ──f──▶ region ──g──▶ [B, T, D] ─▶ dropout, +, norm    P times the same
    sequence parallel   x [B, T/P, D]  ──all_gather──▶ region ──reduce_scatter──▶ [B, T/P, D] ─▶ dropout, +, norm

Tensor parallelism leaves norms, dropouts and the residual stream whole on every rank: the same work
is done P times, and the same activations are kept P times. These modules treat each token
separately, so they can be split by tokens. The all-reduce at the end of a region becomes a
reduce-scatter, and the next region begins with an all-gather. An all-reduce *is* these two, so the
bytes are the same. Backward runs the adjoints: it reduce-scatters where forward gathered, and the
other way round.

Every rank holds the norm weights whole: why do their gradients need an all-reduce? Because each
rank has used its copy on T/P tokens only. A norm weight's gradient is a sum over all tokens, and
rank r has the terms of its own tokens. Without the all-reduce the copies drift apart without a
word, since each norm learns from a part of the sequence. Plain tensor parallelism needs none,
because every rank sees all tokens: that is why it is easily forgotten here. The same holds for all
that is replicated and used on split tokens, such as a bias that is added after a row-parallel
product. `sum_gradient` sums the terms in backward, as soon as the gradient is complete.

A dropout mask is the slice of the serial mask at this rank's positions.

Cost: the bytes of tensor parallelism in twice as many collectives, and one all-reduce of D numbers
for each norm in each backward. Between regions each rank keeps 1/P of the activations. The gathered
input of a region is kept whole for the weights' gradients; Korthikanti et al. keep the shard and
gather it again in backward. (2022, sections 4.2.2 and 4.3.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minidist.full.adjoint import all_gather, reduce_scatter, scatter_to
from minidist.full.comm import Communicator
from minidist.full.model.dropout import Dropout, Where
from minidist.full.tensor.tensor_parallel import TIME, Boundary, where_of


@dataclass(frozen=True)
class SequenceBoundary(Boundary):
    """Enter a region by an all-gather of tokens, and leave it by a reduce-scatter."""

    def enter(self, x: Tensor) -> Tensor:
        """Return all tokens [B, T, D] of `x` [B, T/P, D]."""
        time = x.shape[TIME] * self.comm.size
        return all_gather(x, self.comm, TIME, time)

    def leave(self, x: Tensor) -> Tensor:
        """Return this rank's tokens [B, T/P, D] of the sum of all ranks' `x` [B, T, D].

        Raises as `check_time`.
        """
        check_time(x.shape[TIME], self.comm)
        return reduce_scatter(x, self.comm, TIME)

    def take_tokens(self, x: Tensor, where: Where) -> tuple[Tensor, Where]:
        """Return `x` [B, T/P, D], which is this rank's share already, and where these tokens
        are.
        """
        time = x.shape[TIME] * self.comm.size
        return x, where_of(time, where, self.comm, x.device)

    def join_tokens(self, x: Tensor, time: int) -> Tensor:
        """Return `x`, which stays split."""
        return x


def split_sequence(x: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's tokens [B, T/P, D] of the replicated `x` [B, T, D].

    Raises as `check_time`.
    """
    check_time(x.shape[TIME], comm)
    return scatter_to(x, comm, TIME)


def check_time(time: int, comm: Communicator) -> None:
    """Raise ValueError unless this number of tokens can be split evenly over the ranks."""
    if time % comm.size:
        such = time - time % comm.size
        if such == 0:
            such = comm.size
        fault = f"{time} tokens in a row cannot be split evenly over {comm.size} ranks"
        raise ValueError(
            f"{fault}: with sequence=True choose a length that {comm.size} divides, such as {such}"
        )


def split_dropout(dropout: Dropout, comm: Communicator) -> None:
    """Make a dropout of [B, T/P, D] draw the mask of this rank's positions; its `where` is that of
    all T.
    """
    boundary = SequenceBoundary(comm)
    dropout.register_forward_pre_hook(lambda _, inputs: boundary.take_tokens(*inputs))


def know_all_tokens(stage: nn.Module, comm: Communicator) -> None:
    """Make a later stage of a pipeline, which receives [B, T/P, D], compute with all T positions.

    Its forward gets a placeholder for tokens [B, T], and what came from the stage before becomes
    the embedding's output.
    """
    handed: list[Tensor] = []

    def count(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = inputs
        handed.append(x)
        rows, time = x.shape[0], x.shape[TIME]
        token = torch.empty((), dtype=torch.int64, device=x.device)
        all_tokens = token.expand(rows, time * comm.size)
        return all_tokens, *rest

    stage.register_forward_pre_hook(count)
    stage.get_submodule("embedding").register_forward_hook(lambda *_: handed.pop())
