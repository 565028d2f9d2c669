"""Styles: the ways in which a module of a serial model is split over the ranks of the tensor axis.

    ColumnParallel      cuts a linear layer's outputs               x [.., I] ─▶ [.., O/P]
    RowParallel         cuts a linear layer's inputs                x [.., I/P] ─▶ the sum [.., O]
    VocabularyParallel  cuts an embedding's words
    ParallelRegion      a module around column- and row-parallel layers: its input enters once, for all of them
    SplitSequence       a module that every rank computes whole, and whose output is split along the sequence
    SplitTokens         routed experts: each rank sends its share of the tokens to theirs

A plan (`plan.py`) gives modules their styles. A layer with an adapter W + BA is cut as W is:
columns cut B, rows cut A.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minidist.full.adapters.lora import LoRALinear, linear_in
from minidist.full.adjoint import reduce_from
from minidist.full.comm import Communicator
from minidist.full.model.dropout import Where
from minidist.full.model.moe.routed import RoutedExperts, sum_over
from minidist.full.placement import Block, Bounds, shard
from minidist.full.tensor import tensor_parallel as tensor
from minidist.full.tensor.sequence import split_sequence
from minidist.full.tensor.tensor_parallel import TIME, Boundary, bounds_of, sum_gradient


@dataclass(frozen=True)
class Style(ABC):
    """How a plan has a module split. Subclass it for modules of your own.

    Attributes
    ----------
    kind : type of nn.Module
        The modules that can have this style.
    enters : bool
        The input enters here, for all modules inside: whole parameters inside see this rank's
        channels only.
    leaves : bool
        Whole parameters inside, such as a bias, are used after the sum over channels.
    splits_sequence : bool
        With sequence parallelism the output is split; whole parameters inside see all tokens.
    splits_tokens : bool
        Each rank computes some tokens, also without sequence parallelism; whole parameters inside
        see these only.
    """

    kind: ClassVar[type[nn.Module]] = nn.Module
    enters: ClassVar[bool] = False
    leaves: ClassVar[bool] = False
    splits_sequence: ClassVar[bool] = False
    splits_tokens: ClassVar[bool] = False

    def bounds(self, module: Any, name: str, comm: Communicator) -> tuple[Bounds, int]:
        """Return what each rank is to hold, and how many ranks hold the same.

        Raises ValueError if it cannot be cut.
        """
        return (), 1

    @abstractmethod
    def apply(self, module: Any, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Return the module's replacement.

        `entered` tells that a region around it has let the input enter.
        """


class ParallelRegion(Style):
    """A module whose column-parallel layers read its first input, which enters here, once for all
    of them.

    Only what is cut may use that input: a residual connection belongs outside, or its gradient
    would be counted P times. Whole parameters inside are assumed to see this rank's channels only,
    so their gradients are summed.
    """

    enters = True

    def apply(self, module: nn.Module, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Hook the module.

        Its first input may come by position, or by the name that it has in `forward`.

        Raises
        ------
        TypeError
            When the module is called without its first input.
        """
        first = next(iter(signature(module.forward).parameters), "")

        def enter(
            _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if inputs:
                return (boundary.enter(inputs[0]), *inputs[1:]), named
            if first in named:
                return inputs, {**named, first: boundary.enter(named[first])}
            fault = (
                f"{name} was called with {', '.join(named) or 'nothing'}, and not with its first "
                f"input {first!r}"
            )
            raise TypeError(
                f"{fault}, which has to enter the region: pass it first, or by that name"
            )

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


@dataclass(frozen=True)
class ColumnParallel(Style):
    """Cut a linear layer's outputs.

    Attributes
    ----------
    heads : int
        The outputs form this many heads, and are cut between heads only. With 0 they are cut
        anywhere.
    shared : bool
        Neighbouring ranks may hold the same head, if there are fewer heads than ranks (keys and
        values).
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
        """Cut weight [O, I], bias [O], and B [O, r] along dim 0; every rank keeps A.

        Raises
        ------
        ValueError
            For a layer with an adapter outside of regions: its input would enter for the layer
            alone.
        """
        comm, linear = boundary.comm, linear_in(module)
        if module is not linear and (self.gather or not entered):
            raise ValueError(
                f"{name} has an adapter, and stands in no ParallelRegion: plan one around it"
            )
        bounds, copies = self.bounds(linear, name, comm)
        for label, parameter in module.named_parameters():
            if label != "A":
                shape = torch.Size((linear.out_features, *parameter.shape[1:]))
                shard(parameter, Block(f"{name}.{label}", shape, 0, bounds, copies, comm))
                if copies > 1:
                    sum_gradient(parameter, boundary.sharing(copies))
        gather = comm if self.gather else None
        return around(
            module, tensor.ColumnParallelLinear(linear, None if entered else boundary, gather)
        )


@dataclass(frozen=True)
class RowParallel(Style):
    """Cut a linear layer's inputs, as `ColumnParallel` has cut the outputs that they come from.

    `heads` as there.
    """

    kind = nn.Linear
    leaves = True
    heads: int = 0

    def bounds(self, module: nn.Linear, name: str, comm: Communicator) -> tuple[Bounds, int]:
        """Return those of the inputs. Raises as `bounds_of`."""
        return bounds_of(module.in_features, comm, name, self.heads)

    def apply(self, module: nn.Linear, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Cut weight [O, I] and A [r, I] along dim 1; every rank keeps the bias and B."""
        linear = linear_in(module)
        bounds, _ = self.bounds(linear, name, boundary.comm)
        for label, parameter in module.named_parameters():
            if label in ("weight", "base.weight", "A"):
                shard(
                    parameter,
                    Block(f"{name}.{label}", parameter.shape, 1, bounds, 1, boundary.comm),
                )
        if isinstance(module, LoRALinear):
            module.join = boundary.leave  # of r channels, before the whole B: a small message
        return around(module, tensor.RowParallelLinear(linear, boundary))


@dataclass(frozen=True)
class VocabularyParallel(Style):
    """Cut an embedding by words."""

    kind = nn.Embedding
    splits_sequence = True

    def bounds(self, module: nn.Embedding, name: str, comm: Communicator) -> tuple[Bounds, int]:
        """Return those of the words.

        Raises as `bounds_of`, and for options of torch's embedding.
        """
        if (
            module.padding_idx is not None
            or module.max_norm is not None
            or module.scale_grad_by_freq
        ):
            raise ValueError(
                f"{name} has padding_idx, max_norm or scale_grad_by_freq: VocabularyParallel "
                "knows none"
            )
        return bounds_of(module.num_embeddings, comm, name)

    def apply(
        self, module: nn.Embedding, name: str, boundary: Boundary, entered: bool
    ) -> nn.Module:
        """Cut weight [V, D] along dim 0."""
        shape = torch.Size((module.num_embeddings, module.embedding_dim))
        bounds, _ = self.bounds(module, name, boundary.comm)
        shard(module.weight, Block(f"{name}.weight", shape, 0, bounds, 1, boundary.comm))
        return tensor.VocabularyParallelEmbedding(module, boundary)


class SplitSequence(Style):
    """For a module that every rank computes whole, such as an embedding: of its output [B, T, D]
    keep [B, T/P, D].

    Its parameters get whole gradients, because backward gathers the tokens. Forward sends no
    message.
    """

    splits_sequence = True

    def apply(self, module: nn.Module, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Hook the module."""
        module.register_forward_hook(lambda module, inputs, x: split_sequence(x, boundary.comm))
        return module


class SplitTokens(Style):
    """Let each rank route its share of the tokens. Every rank has the whole router."""

    kind = RoutedExperts
    splits_tokens = True

    def apply(
        self, module: RoutedExperts, name: str, boundary: Boundary, entered: bool
    ) -> nn.Module:
        """Hook the module."""
        sum_over(module, partial(reduce_from, comm=boundary.comm))
        times: list[int] = []  # of the tokens that come to the module

        def take(_: nn.Module, inputs: tuple[Tensor, Where]) -> tuple[Tensor, Where]:
            times.append(inputs[0].shape[TIME])
            return boundary.take_tokens(*inputs)

        module.register_forward_pre_hook(take)
        module.register_forward_hook(lambda module, inputs, x: boundary.join_tokens(x, times.pop()))
        return module


def around(module: nn.Module, layer: nn.Linear) -> nn.Module:
    """Return the layer, with the adapter around it that its whole version has in `module`."""
    if isinstance(module, LoRALinear):
        module.base = layer
        return module
    return layer
