"""Tensor-parallel layers to build directly, where there is no serial model to be split.

    h = ColumnParallelLinear(D, F, comm, generator=g)(x)       x [.., D] on every rank ─▶ [.., F/P]
    y = RowParallelLinear(F, D, comm, generator=g)(h)          ─▶ y [.., D] on every rank

Each is what its style (`styles.py`) makes of the serial layer: the same parameters, placements and messages.
torch draws the *whole* weight, from a seed that the generator gives alike on all ranks, and each rank keeps its slice:
any number of ranks starts from the same numbers. While it is built, a layer is whole on every rank.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from minidist.comm import Communicator, MismatchError
from minidist.parallel.tensor import tensor_parallel as tensor
from minidist.parallel.tensor.styles import ColumnParallel, RowParallel, Style, VocabularyParallel
from minidist.parallel.tensor.tensor_parallel import Boundary

DRAWING = threading.Lock()  # ranks that are threads take turns


class ColumnParallelLinear(tensor.ColumnParallelLinear):
    """`nn.Linear` of which each rank has some outputs: x [.., I], the same on every rank, to [.., O/P].

    Parameters
    ----------
    in_features, out_features
        Of the whole layer, as for `nn.Linear`.
    comm : Communicator
        The ranks of the tensor axis. Backward all-reduces the gradient of `x` among them.
    gather : bool
        Return all outputs on every rank, which costs an all-gather, instead of this rank's.
    generator : torch.Generator
        Gives the seed from which torch draws the whole weight and bias; in the same state on every rank. Needed.
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
        self, in_features: int, out_features: int, comm: Communicator, *, gather: bool = False, **options: Any
    ) -> None:
        _become(self, ColumnParallel(gather=gather), comm, in_features, out_features, **options)


class RowParallelLinear(tensor.RowParallelLinear):
    """`nn.Linear` of which each rank has some inputs: x [.., I/P] to the sum over ranks [.., O], on every rank.

    Forward all-reduces the sum; the bias is whole on every rank. Arguments are those of `ColumnParallelLinear`.
    """

    def __init__(self, in_features: int, out_features: int, comm: Communicator, **options: Any) -> None:
        _become(self, RowParallel(), comm, in_features, out_features, **options)


class VocabularyParallelEmbedding(tensor.VocabularyParallelEmbedding):
    """`nn.Embedding` of which each rank has some words: tokens [..] to vectors [.., D], on every rank.

    Forward all-reduces the vectors. Arguments are those of `nn.Embedding` and `ColumnParallelLinear`.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, comm: Communicator, **options: Any) -> None:
        _become(self, VocabularyParallel(), comm, num_embeddings, embedding_dim, **options)


def _become(
    layer: nn.Module, style: Style, comm: Communicator, *sizes: int, generator: torch.Generator, **options: Any
) -> None:
    """Draw the whole layer, and let `layer` be what the style makes of it."""
    name, seed = type(layer).__name__, int(torch.randint(1 << 62, (), generator=generator))
    with DRAWING, torch.random.fork_rng():  # torch's layers draw from its default generators, which threads share
        torch.manual_seed(seed)
        whole = style.kind(*sizes, **options)
    style.bounds(whole, name, comm)  # complains before anything is sent
    if len(set(comm.roll_call(seed))) > 1:
        raise MismatchError(f"the generators of a {name} are not in the same state on all ranks: seed them alike")
    layer.__dict__ = style.apply(whole, name, Boundary(comm), entered=False).__dict__
