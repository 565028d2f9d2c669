"""Tensor parallelism for any serial model: its layers are replaced, its parameters cut in place.

The cuts are recorded. They need not be equal, and several ranks may share a key-value head.

Embedding: each rank looks up the words that it holds and has zeros for the others; the sum over
ranks joins them. The head is cut by words as well, and its logits stay split (see `vocabulary.py`).
Cuts are those of `numpy.array_split`, so a vocabulary that P does not divide needs no padding: the
first ranks hold one row more.

Grouped queries: with fewer key-value heads than ranks, P/H_kv ranks hold the same head. Each gets
the gradient of its own queries only, so they sum the gradients of that head's weights: two
all-reduces a layer among P/H_kv ranks, each of a matrix [d, D]. (Ainslie et al. 2023.) All other
costs are those of `minidist/tensor.py`.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.full.adjoint import copy_to, gather_from, reduce_from, scatter_to
from minidist.full.collectives.fast import cut
from minidist.full.comm import Communicator
from minidist.full.model.dropout import Where
from minidist.full.placement import Bounds
from minidist.full.tensor.vocabulary import check_ids, part_of

TIME = 1  # the dim of [B, T, D] along which tokens are split

# ---------------------------------------------------------------- what each rank holds


def bounds_of(
    size: int, comm: Communicator, name: str, heads: int = 0, shared: bool = False
) -> tuple[Bounds, int]:
    """Return which of `size` channels each rank holds, and how many neighbouring ranks hold the
    same.

    Channels that form `heads` are cut between heads only; if they are `shared`, several ranks may
    hold one head.

    Raises
    ------
    ValueError
        If the heads cannot be dealt out in this way, or a rank would hold nothing.
    """
    ranks, copies = comm.size, 1
    if heads:
        copies = ranks // heads if shared and ranks > heads else 1
        if size % heads or heads * copies % ranks:
            fault = f"{name}: {heads} heads cannot be dealt out to {ranks} ranks"
            also = f", or one that {heads} divides" if shared else ""
            raise ValueError(f"{fault}: choose a number of ranks that divides {heads}{also}")
    counts = cut(size, ranks // copies)
    if not all(counts):
        raise ValueError(
            f"{name} has {size} rows or columns to cut, too few for {ranks} ranks: use at most "
            f"{size}"
        )
    parts = list(pairwise((0, *accumulate(counts))))
    return tuple(parts[rank // copies] for rank in range(ranks)), copies


def sum_gradient(parameter: Tensor, comm: Communicator) -> None:
    """Make backward sum a parameter's gradient over `comm`, where each rank computes some of its
    terms.

    The sum comes before the gradient is accumulated, and so before data parallelism reduces it.
    (Where a pipeline puts weight gradients off, autograd calls with None first.) Nothing is done
    for a frozen parameter.

    Cost: one all-reduce of the parameter's size in each backward that has a gradient for it.
    """

    def add_up(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else reduce_from(gradient, comm)

    if parameter.requires_grad and comm.size > 1:
        parameter.register_hook(add_up)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- the border of a region


def where_of(time: int, where: Where, comm: Communicator, device: torch.device) -> Where:
    """Return where this rank's share of `time` tokens is; `where` is that of all of them."""
    return replace(
        where,
        positions=torch.split(where.position_numbers(time, device), cut(time, comm.size))[
            comm.rank
        ],
    )


class Copies(dict[int, Communicator]):
    """Communicators of ranks that hold the same slice, by the number of these ranks."""


@dataclass(frozen=True)
class Boundary:
    """How activations enter and leave a tensor-parallel region.

    Here by f and g: outside they are replicated.
    """

    comm: Communicator

    def enter(self, x: Tensor) -> Tensor:
        """Return `x` [B, T, D] for each rank to compute its own with."""
        return copy_to(x, self.comm)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x` [B, T, D]."""
        return reduce_from(x, self.comm)

    def take_tokens(self, x: Tensor, where: Where) -> tuple[Tensor, Where]:
        """Return this rank's share of `x` [B, T, D], along T, and where these tokens are."""
        return scatter_to(x, self.comm, TIME), where_of(x.shape[TIME], where, self.comm, x.device)

    def join_tokens(self, x: Tensor, time: int) -> Tensor:
        """Return all ranks' shares, `time` tokens long together, on every rank."""
        return gather_from(x, self.comm, TIME, time)

    def sharing(self, copies: int) -> Communicator:
        """Return the communicator of the `copies` neighbours that hold the same slice.

        Collective the first time.
        """
        groups = self.comm.keep(Copies, Copies)
        if copies not in groups:
            groups[copies] = self.comm.split(color=self.comm.rank // copies)
        return groups[copies]


# ---------------------------------------------------------------- the layers


class PartOfLinear(nn.Linear):
    """A linear layer whose weight was cut; its sizes are those of this rank's part."""

    def __init__(self, whole: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = whole.weight, whole.bias
        self.out_features, self.in_features = whole.weight.shape

    def product(self, x: Tensor) -> Tensor:
        """Return x Wᵀ. A pipeline that puts weight gradients off has a product of its own."""
        return F.linear(x, self.weight)


class ColumnParallelLinear(PartOfLinear):
    """A linear map of which this rank has some outputs: x [..., I] to [..., O/P]."""

    def __init__(
        self, whole: nn.Linear, boundary: Boundary | None, gather: Communicator | None
    ) -> None:
        super().__init__(whole)
        self.all_features, self.boundary, self.gather = whole.out_features, boundary, gather

    def forward(self, x: Tensor) -> Tensor:
        """Enter, multiply, and add the bias.

        `boundary` is None where a region around the layer has entered already.
        """
        pieces = self.product(x if self.boundary is None else self.boundary.enter(x))
        pieces = pieces if self.bias is None else pieces + self.bias
        return (
            pieces
            if self.gather is None
            else gather_from(pieces, self.gather, -1, self.all_features)
        )


class RowParallelLinear(PartOfLinear):
    """A linear map of which this rank has some inputs: x [..., I/P] to the sum over ranks [...,
    O].
    """

    def __init__(self, whole: nn.Linear, boundary: Boundary) -> None:
        super().__init__(whole)
        self.boundary = boundary

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, sum over the ranks, and only then add the bias, which every rank has whole."""
        total = self.boundary.leave(self.product(x))
        return total if self.bias is None else total + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which this rank has some words: tokens [B, T] to the sum over ranks [B, T,
    D].
    """

    def __init__(self, whole: nn.Embedding, boundary: Boundary) -> None:
        super().__init__()
        self.weight, self.boundary = whole.weight, boundary
        self.vocabulary = whole.num_embeddings

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up this rank's words, and zeros for the others.

        The sum brings their vectors from other ranks.
        """
        check_ids(tokens, self.vocabulary)
        words = part_of(self.vocabulary, self.boundary.comm)
        elsewhere = (tokens < words.start) | (tokens >= words.stop)
        vectors = F.embedding((tokens - words.start).masked_fill(elsewhere, 0), self.weight)
        return self.boundary.leave(vectors.masked_fill(elsewhere[..., None], 0))
