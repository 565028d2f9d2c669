"""Tensor parallelism beyond `plain.py`: the layers of any serial model are replaced, its parameters cut in place and
recorded; the embedding is cut by words; cuts need not be equal, and ranks may share a key-value head.

    f and g           a `Boundary`, which sequence parallelism replaces (`sequence.py`); x enters once, at the border of
                      the region (`ParallelRegion`)
    column and row    `ColumnParallelLinear` and `RowParallelLinear`, instead of the layers that the module has

Each rank looks up its own words in the embedding, has zero for the others, and the sum puts them together. The head is
cut by words too, and its logits stay split (see `vocabulary.py`). Cuts are `numpy.array_split`'s, so a vocabulary that
P does not divide needs no padding: rank 0 holds a row more, where padding would make all hold one more.

Grouped queries: with fewer key-value heads than ranks, P/H_kv ranks hold the same head. Each gets the gradient of its
own queries only, so they sum the gradients of that head's weights: two all-reduces a layer, among P/H_kv ranks, of a
matrix [d, D] each. (Ainslie et al. 2023.) All other costs are those of `plain.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.collectives.fast import cut
from minidist.comm import Communicator
from minidist.parallel.adjoint import copy_to, gather_from, reduce_from
from minidist.parallel.placement import Bounds, TensorPlacement, tensor_placement_of
from minidist.parallel.tensor.vocabulary import check_ids, part_of

# ---------------------------------------------------------------- what each rank holds


def bounds_of(size: int, comm: Communicator, name: str, heads: int = 0, shared: bool = False) -> tuple[Bounds, int]:
    """Return what each rank holds of `size` channels, and how many neighbours hold the same.

    Raises
    ------
    ValueError
        If so many `heads` cannot be dealt out whole (`shared`: one to several ranks), or a rank would have nothing.
    """
    ranks, copies = comm.size, 1
    if heads:
        copies = ranks // heads if shared and ranks > heads else 1
        if size % heads or heads * copies % ranks:
            raise ValueError(
                f"{name}: {heads} heads cannot be dealt out to {ranks} ranks: choose a number of ranks that divides "
                f"{heads}" + (f", or one that {heads} divides" if shared else "")
            )
    counts = cut(size, ranks // copies)
    if not all(counts):
        raise ValueError(f"{name} has {size} rows or columns to cut, too few for {ranks} ranks: use at most {size}")
    parts = list(pairwise((0, *accumulate(counts))))
    return tuple(parts[rank // copies] for rank in range(ranks)), copies


def shard(parameter: Tensor, placement: TensorPlacement) -> None:
    """Replace a parameter, in place, by this rank's slice of it, and give the memory of the rest back.

    A tied parameter stays tied: it is cut once.

    Raises
    ------
    ValueError
        If the parameter has been cut in another way before.
    """
    before = tensor_placement_of(parameter)
    if before is None:
        piece = placement.take(parameter.data)
        parameter.data = piece if placement.dim is None else piece.clone(memory_format=torch.contiguous_format)
        parameter.grad = None
        parameter.tensor_placement = placement  # type: ignore[attr-defined]
    elif (before.dim, before.bounds) != (placement.dim, placement.bounds) or placement.comm is not before.comm:
        raise ValueError(
            f"{placement.name} is {before.name}, which has been cut otherwise (along dim {before.dim}): give modules "
            "that share a parameter styles that cut it alike, and split a model only once"
        )


def load_slices(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Give each parameter its slice of a whole one, which is let go before the next one is drawn or read.

    Raises
    ------
    ValueError
        Naming the parameter, if one is missing, unknown, or of another shape.
    """
    wanted = dict(model.named_parameters())
    for name, whole in weights:
        parameter = wanted.pop(name, None)
        placement = None if parameter is None else tensor_placement_of(parameter)
        shape = None if parameter is None else placement.shape if placement else parameter.shape
        if parameter is None or whole.shape != shape:
            raise ValueError(f"a weight {name} of shape {tuple(whole.shape)} came, but the model has {shape} there")
        piece = placement.take(whole) if placement else whole
        parameter.data = piece.to(parameter.device, parameter.dtype, copy=True, memory_format=torch.contiguous_format)
    if wanted:
        raise ValueError(f"no weight came for {', '.join(list(wanted)[:3])}: bring the whole model's")


def sum_gradient(parameter: Tensor, comm: Communicator) -> None:
    """Have backward sum a gradient over `comm`, if each rank computes some terms of it. A frozen one has none.

    Cost: one all-reduce of the parameter's size in every backward that has a gradient for it. (Where a pipeline puts
    weight gradients off, autograd comes with None first.) The sum comes before the gradient is accumulated, and so
    before data parallelism takes it.
    """

    def add_up(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else reduce_from(gradient, comm)

    if parameter.requires_grad and comm.size > 1:
        parameter.register_hook(add_up)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- the border of a region


class Copies(dict[int, Communicator]):
    """The communicators of ranks that hold the same slice, by how many ranks that are."""


@dataclass(frozen=True)
class Boundary:
    """How activations enter and leave what is computed in pieces. Here: replicated outside, f and g."""

    comm: Communicator

    def enter(self, x: Tensor) -> Tensor:
        """Return `x` [B, T, D] for each rank to compute its own with."""
        return copy_to(x, self.comm)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x` [B, T, D]."""
        return reduce_from(x, self.comm)

    def sharing(self, copies: int) -> Communicator:
        """Return the ranks that hold the same slice, `copies` neighbours. Collective the first time."""
        groups = self.comm.keep(Copies, Copies)
        if copies not in groups:
            groups[copies] = self.comm.split(color=self.comm.rank // copies)
        return groups[copies]


# ---------------------------------------------------------------- the layers


class PartOfLinear(nn.Linear):
    """A linear layer whose weight has been cut, with parameters and sizes of its own part."""

    def __init__(self, whole: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = whole.weight, whole.bias
        self.out_features, self.in_features = whole.weight.shape

    def product(self, x: Tensor) -> Tensor:
        """Return x Wᵀ. A pipeline that puts weight gradients off has a product of its own."""
        return F.linear(x, self.weight)


class ColumnParallelLinear(PartOfLinear):
    """A linear map of which this rank has some outputs: x [..., I] to [..., O/P]."""

    def __init__(self, whole: nn.Linear, boundary: Boundary | None, gather: Communicator | None) -> None:
        super().__init__(whole)
        self.all_features, self.boundary, self.gather = whole.out_features, boundary, gather

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; `boundary` is None where the region around this layer has entered already."""
        pieces = self.product(x if self.boundary is None else self.boundary.enter(x))
        pieces = pieces if self.bias is None else pieces + self.bias
        return pieces if self.gather is None else gather_from(pieces, self.gather, -1, self.all_features)


class RowParallelLinear(PartOfLinear):
    """A linear map of which this rank has some inputs: x [..., I/P] to the sum over ranks [..., O]."""

    def __init__(self, whole: nn.Linear, boundary: Boundary) -> None:
        super().__init__(whole)
        self.boundary = boundary

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, add up, and only then add the bias, which every rank has whole."""
        total = self.boundary.leave(self.product(x))
        return total if self.bias is None else total + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which this rank has some words: tokens [B, T] to the sum over ranks [B, T, D]."""

    def __init__(self, whole: nn.Embedding, boundary: Boundary) -> None:
        super().__init__()
        self.weight, self.boundary = whole.weight, boundary
        self.vocabulary = whole.num_embeddings

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the words that are here. The others give zero; the sum brings their vectors from other ranks."""
        check_ids(tokens, self.vocabulary)
        words = part_of(self.vocabulary, self.boundary.comm)
        elsewhere = (tokens < words.start) | (tokens >= words.stop)
        vectors = F.embedding((tokens - words.start).masked_fill(elsewhere, 0), self.weight)
        return self.boundary.leave(vectors.masked_fill(elsewhere[..., None], 0))
