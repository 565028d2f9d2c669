"""Styles: what can be done to a module of a serial model to split it over the ranks of the tensor axis.

    ColumnParallel      a linear layer's outputs are cut            x [.., I] ─▶ [.., O/P]
    RowParallel         its inputs are cut                          x [.., I/P] ─▶ the sum [.., O]
    VocabularyParallel  an embedding's words are cut
    ParallelRegion      what is around column- and row-parallel layers: inputs enter once, for all of them
    SplitSequence       a whole module whose output is split along the sequence

A plan (`plan.py`) says which module gets which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from minidist.comm import Communicator
from minidist.parallel.placement import Bounds, TensorPlacement
from minidist.parallel.tensor.sequence import split_sequence
from minidist.parallel.tensor.tensor_parallel import (
    Boundary,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    bounds_of,
    shard,
    sum_gradient,
)


@dataclass(frozen=True)
class Style(ABC):
    """What a plan asks to be done to a module. Subclass it for modules of your own."""

    kind: ClassVar[type[nn.Module]] = nn.Module  # of the modules that it is for
    enters: ClassVar[bool] = False  # inputs enter here for all that is inside, which then computes some channels only
    leaves: ClassVar[bool] = False  # what is not cut inside, a bias, is used after the sum over channels
    splits_sequence: ClassVar[bool] = False  # it can hand on this rank's tokens only; what is inside sees all

    def bounds(self, module: Any, name: str, comm: Communicator) -> tuple[Bounds, int]:
        """Return what each rank is to hold, and how many hold the same. Raises ValueError if that cannot be."""
        return (), 1

    @abstractmethod
    def apply(self, module: Any, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Return what replaces the module; `entered` tells that a `ParallelRegion` around it takes care of inputs."""


class ParallelRegion(Style):
    """A module whose column-parallel layers read its first input, which enters here, once for all of them.

    Nothing but what is computed in pieces may use that input: a residual connection belongs outside, or its gradient
    would be counted P times. Parameters inside that are not cut are taken to see this rank's channels only: their
    gradients are summed.
    """

    enters = True

    def apply(self, module: nn.Module, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Hook the module."""
        module.register_forward_pre_hook(lambda _, inputs: (boundary.enter(inputs[0]), *inputs[1:]))
        return module


@dataclass(frozen=True)
class ColumnParallel(Style):
    """Cut a linear layer's outputs.

    Attributes
    ----------
    heads : int
        The outputs are this many heads, which are not cut; 0: any cut will do.
    shared : bool
        If there are fewer heads than ranks, neighbouring ranks hold the same one (keys and values).
    gather : bool
        Return the whole output on every rank, replicated, instead of this rank's part.
    """

    kind = nn.Linear
    heads: int = 0
    shared: bool = False
    gather: bool = False

    def bounds(self, module: nn.Linear, name: str, comm: Communicator) -> tuple[Bounds, int]:
        """Return those of the outputs. Raises as `bounds_of`."""
        return bounds_of(module.out_features, comm, name, self.heads, self.shared)

    def apply(self, module: nn.Linear, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Cut weight [O, I] and bias [O] along dim 0."""
        comm = boundary.comm
        bounds, copies = self.bounds(module, name, comm)
        for label, parameter in module.named_parameters():
            shape = torch.Size((module.out_features, *parameter.shape[1:]))
            shard(parameter, TensorPlacement(f"{name}.{label}", shape, 0, bounds, copies, comm))
            if copies > 1:
                sum_gradient(parameter, boundary.sharing(copies))
        return ColumnParallelLinear(module, None if entered else boundary, comm if self.gather else None)


@dataclass(frozen=True)
class RowParallel(Style):
    """Cut a linear layer's inputs, which come from what `ColumnParallel` has cut; `heads` as there."""

    kind = nn.Linear
    leaves = True
    heads: int = 0

    def bounds(self, module: nn.Linear, name: str, comm: Communicator) -> tuple[Bounds, int]:
        """Return those of the inputs. Raises as `bounds_of`."""
        return bounds_of(module.in_features, comm, name, self.heads)

    def apply(self, module: nn.Linear, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Cut weight [O, I] along dim 1; every rank keeps the bias."""
        shape, (bounds, _) = module.weight.shape, self.bounds(module, name, boundary.comm)
        shard(module.weight, TensorPlacement(f"{name}.weight", shape, 1, bounds, 1, boundary.comm))
        return RowParallelLinear(module, boundary)


@dataclass(frozen=True)
class VocabularyParallel(Style):
    """Cut an embedding by words."""

    kind = nn.Embedding
    splits_sequence = True

    def bounds(self, module: nn.Embedding, name: str, comm: Communicator) -> tuple[Bounds, int]:
        """Return those of the words. Raises as `bounds_of`, and for options of torch's embedding."""
        if module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq:
            raise ValueError(f"{name} has padding_idx, max_norm or scale_grad_by_freq: VocabularyParallel knows none")
        return bounds_of(module.num_embeddings, comm, name)

    def apply(self, module: nn.Embedding, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Cut weight [V, D] along dim 0."""
        shape = torch.Size((module.num_embeddings, module.embedding_dim))
        bounds, _ = self.bounds(module, name, boundary.comm)
        shard(module.weight, TensorPlacement(f"{name}.weight", shape, 0, bounds, 1, boundary.comm))
        return VocabularyParallelEmbedding(module, boundary)


class SplitSequence(Style):
    """For a module that all ranks compute alike, such as a whole embedding: of its output [B, T, D] keep [B, T/P, D].

    Its parameters get whole gradients: backward gathers the tokens. No message in forward.
    """

    splits_sequence = True

    def apply(self, module: nn.Module, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Hook the module."""
        module.register_forward_hook(lambda module, inputs, x: split_sequence(x, boundary.comm))
        return module
