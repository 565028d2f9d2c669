"""Tensor-parallel layers that are built directly, where there is no serial model to split.

    h = ColumnParallelLinear(D, F, comm, generator=g)(x)       x [.., D] on every rank ─▶ [.., F/P]
    y = RowParallelLinear(F, D, comm, generator=g)(h)          ─▶ y [.., D] on every rank

Each layer is what its style (`styles.py`) makes of the serial layer: same parameters, same
placements, same messages. torch draws the *whole* weight on every rank, from one seed, and each
rank keeps its slice. So any number of ranks starts from the same numbers. While a layer is built,
every rank holds it whole.
"""

import threading
from typing import Any

import torch
from torch import nn

from minidist.full.comm import Communicator, MismatchError
from minidist.full.tensor import tensor_parallel as tensor
from minidist.full.tensor.styles import ColumnParallel, RowParallel, Style, VocabularyParallel
from minidist.full.tensor.tensor_parallel import Boundary

DRAWING = threading.Lock()  # ranks that are threads take turns


class ColumnParallelLinear(tensor.ColumnParallelLinear):
    """`nn.Linear` of which each rank has some outputs: from x [.., I], the same on every rank, to
    [.., O/P].

    Parameters
    ----------
    in_features, out_features
        Of the whole layer, as for `nn.Linear`.
    comm : Communicator
        The ranks of the tensor axis. Backward all-reduces the gradient of `x` among them.
    gather : bool
        Return all outputs on every rank, instead of this rank's. That costs an all-gather in
        forward.
    generator : torch.Generator
        Required. Draws the seed for the whole weight and bias; it must be in the same state on
        every rank.
    **options
        `bias`, `dtype` and `device`, as for `nn.Linear`.

    Raises
    ------
    ValueError
        If there are fewer outputs than ranks.
    MismatchError
        On every rank, if the generators are in different states.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        *,
        gather: bool = False,
        **options: Any,
    ) -> None:
        _become(self, ColumnParallel(gather=gather), comm, in_features, out_features, **options)


class RowParallelLinear(tensor.RowParallelLinear):
    """`nn.Linear` of which each rank has some inputs: from x [.., I/P] to the sum over ranks [..,
    O], on every rank.

    Forward all-reduces the product; every rank has the whole bias. Arguments are those of
    `ColumnParallelLinear`.
    """

    def __init__(
        self, in_features: int, out_features: int, comm: Communicator, **options: Any
    ) -> None:
        _become(self, RowParallel(), comm, in_features, out_features, **options)


class VocabularyParallelEmbedding(tensor.VocabularyParallelEmbedding):
    """`nn.Embedding` of which each rank has some words: from tokens [..] to vectors [.., D], on
    every rank.

    Forward all-reduces the vectors. Arguments are those of `nn.Embedding` and
    `ColumnParallelLinear`.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, comm: Communicator, **options: Any
    ) -> None:
        _become(self, VocabularyParallel(), comm, num_embeddings, embedding_dim, **options)


def _become(
    layer: nn.Module,
    style: Style,
    comm: Communicator,
    *sizes: int,
    generator: torch.Generator,
    **options: Any,
) -> None:
    """Draw the whole layer, and make `layer` what the style makes of that."""
    name, seed = type(layer).__name__, int(torch.randint(1 << 62, (), generator=generator))
    # torch's layers draw from its default generators, which threads share
    with DRAWING, torch.random.fork_rng():
        torch.manual_seed(seed)
        whole = style.kind(*sizes, **options)
    style.bounds(whole, name, comm)  # complains before anything is sent
    if len(set(comm.all_gather_object(seed))) > 1:
        raise MismatchError(
            f"the generators of a {name} are not in the same state on all ranks: seed them alike"
        )
    layer.__dict__ = style.apply(whole, name, Boundary(comm), entered=False).__dict__
