"""Applying tensor parallelism to a serial model, from outside, by a plan: which module is split in which style.

    parallelize_tensor(model, mesh.tp)                              a GPT of ours
    parallelize_tensor(model, mesh.tp, sequence=True)               and the sequence between its regions
    parallelize_tensor(mine, mesh.tp, {                             any model: name patterns, `*` is one part of a name
        "blocks.*.mlp": ParallelRegion(),                           ... enter once for both
        "blocks.*.mlp.gate": ColumnParallel(), "blocks.*.mlp.up": ColumnParallel(),
        "blocks.*.mlp.down": RowParallel(),
    })

All ranks then bring the same tokens. Of `state_dict` the names stay and the tensors are slices; the record of each
parameter (`tensor_placement_of`) says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from minidist.comm import Communicator
from minidist.model import GPT, GPTConfig
from minidist.model.dropout import Dropout
from minidist.parallel.meta import on_device
from minidist.parallel.placement import Bounds, TensorPlacement, tensor_placement_of
from minidist.parallel.replicas import check_same, make_equal
from minidist.parallel.sequence import SequenceBoundary, split_dropout, split_sequence
from minidist.parallel.tensor import (
    Boundary,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    bounds_of,
    load_slices,
    shard,
    sum_gradient,
)


@dataclass(frozen=True)
class Style:
    """What a plan asks to be done to a module. Subclass it for modules of your own."""

    kind: ClassVar[type[nn.Module]] = nn.Module

    def bounds(self, module: Any, name: str, comm: Communicator) -> tuple[Bounds, int]:
        """Return what each rank is to hold, and how many hold the same. Raises ValueError if that cannot be."""
        return (), 1

    def apply(self, module: Any, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Return what replaces the module; `entered` tells that a `ParallelRegion` around it takes care of inputs."""
        raise NotImplementedError


class ParallelRegion(Style):
    """A module whose column-parallel layers read its first input, which enters here, once for all of them.

    Nothing but what is computed in pieces may use that input: a residual connection belongs outside, or its gradient
    would be counted P times. Parameters inside that are not cut are taken to see this rank's channels only: their
    gradients are summed.
    """

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

    def apply(self, module: nn.Module, name: str, boundary: Boundary, entered: bool) -> nn.Module:
        """Hook the module."""
        module.register_forward_hook(lambda module, inputs, x: split_sequence(x, boundary.comm))
        return module


Plan: TypeAlias = Mapping[str, Style]


def gpt_plan(config: GPTConfig) -> Plan:
    """Return the plan for our GPT: attention by heads, the MLP by channels, embedding and head by words."""
    key_value = ColumnParallel(heads=config.key_value_heads, shared=True)
    return {
        "embedding": VocabularyParallel(),
        "layers.*.attention": ParallelRegion(),
        "layers.*.attention.query": ColumnParallel(heads=config.heads),
        "layers.*.attention.key": key_value,
        "layers.*.attention.value": key_value,
        "layers.*.attention.output": RowParallel(heads=config.heads),
        "layers.*.mlp": ParallelRegion(),
        "layers.*.mlp.gate": ColumnParallel(),
        "layers.*.mlp.up": ColumnParallel(),
        "layers.*.mlp.down": RowParallel(),
        "head": ColumnParallel(),  # its logits stay split: the loss is vocabulary_parallel_cross_entropy_sum
    }


def parallelize_tensor(
    model: nn.Module,
    comm: Communicator,
    plan: Plan | None = None,
    sequence: bool = False,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Split a model over the ranks of `comm`, in place. Collective.

    Parameters
    ----------
    model : nn.Module
        Serial, built on every rank; rank 0's values count. Its forward keeps its signature, and an optimizer built
        later or before updates this rank's slices.
    plan : optional
        Styles by patterns of module names. By default `gpt_plan`, for a GPT.
    sequence : bool
        Split the sequence [B, T, D] along T between the regions. The plan then has a module that splits it first
        (`VocabularyParallel` or `SplitSequence`); T must be a multiple of the ranks.
    weights, device : optional
        For a model that is too large for one rank, built on the device `meta`: whole parameters one by one, such as
        `GPT(config, device="meta").initial_weights(generator)`, and where this rank's slices of them are to be. No
        rank then holds more than its slices and one whole parameter, and nothing is sent.

    Raises
    ------
    ValueError, TypeError
        On every rank, before anything is sent, for a plan that does not fit the model or the number of ranks.
    MismatchError
        If the ranks built different models; differing values are no mistake.

    Cost: one broadcast of the model. See `tensor.py` and `sequence.py` for that of a step.
    """
    if any(tensor_placement_of(parameter) is not None for parameter in model.parameters()):
        raise ValueError("the model has been split already: call parallelize_tensor once, on a serial model")
    if plan is None:
        if not isinstance(model, GPT):
            raise TypeError(f"no plan is known for a {type(model).__name__}: pass plan={{pattern: style, ...}}")
        plan = gpt_plan(model.config)
    styles = _matched(model, plan)
    for name, style in styles.items():
        module, kind = model.get_submodule(name), type(style).__name__
        if not isinstance(module, style.kind):
            raise TypeError(
                f"{name} is of kind {type(module).__name__}, but {kind} splits {style.kind.__name__}: change the plan"
            )
        style.bounds(module, name, comm)
    if sequence and not any(isinstance(style, VocabularyParallel | SplitSequence) for style in styles.values()):
        raise ValueError(
            "sequence=True, but nothing in the plan splits the sequence: name the embedding, as VocabularyParallel() "
            "or SplitSequence()"
        )
    if weights is not None:
        on_device(model, torch.device(device))
    if comm.size > 1:
        check_same(model, comm) if weights is not None else make_equal(model, comm)
        _split(model, styles, SequenceBoundary(comm) if sequence else Boundary(comm))
    if weights is not None:
        load_slices(model, weights)


def _split(model: nn.Module, styles: Mapping[str, Style], boundary: Boundary) -> None:
    """Apply each style, and see to what no style names: whole parameters, and dropouts of a split sequence."""
    regions = [name for name, style in styles.items() if isinstance(style, ParallelRegion)]
    for name, style in styles.items():
        replacement = style.apply(model.get_submodule(name), name, boundary, _below(name, regions))
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, replacement)
    _replicate_the_rest(model, styles, boundary)
    for module in model.modules():
        if isinstance(module, Dropout) and isinstance(boundary, SequenceBoundary):
            split_dropout(module, boundary.comm)


def _replicate_the_rest(model: nn.Module, styles: Plan, boundary: Boundary) -> None:
    """Give whole parameters their record, and have gradients summed of which each rank computes some terms."""
    comm = boundary.comm
    sequence = isinstance(boundary, SequenceBoundary)
    regions = [name for name, style in styles.items() if isinstance(style, ParallelRegion)]
    before = [name for name, style in styles.items() if isinstance(style, SplitSequence)]
    rows = [name for name, style in styles.items() if isinstance(style, RowParallel)]
    for name, parameter in model.named_parameters():
        if tensor_placement_of(parameter) is None:
            nowhere = ((0, 0),) * comm.size
            shard(parameter, TensorPlacement(name, parameter.shape, None, nowhere, comm.size, comm))
            inside = _below(name, regions) and not _below(name, rows)  # a row-parallel bias comes after the sum
            if inside or (sequence and not _below(name, before)):
                sum_gradient(parameter, comm)


def _matched(model: nn.Module, plan: Plan) -> dict[str, Style]:
    """Return the style of each module that a pattern names. Raises ValueError."""
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, tuple[str, Style]] = {}
    for pattern, style in plan.items():
        matches = [name for name in names if _fits(name, pattern)]
        if not matches:
            raise ValueError(
                f"the plan names {pattern!r}, which no module of the model has: the names are such as "
                f"{', '.join(names[:3])}, ..., {names[-1]}"
            )
        for name in matches:
            if name in found:
                raise ValueError(f"{name} is named twice in the plan, by {found[name][0]!r} and by {pattern!r}")
            found[name] = pattern, style
    return {name: style for name, (_, style) in found.items()}


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _below(name: str, tops: list[str]) -> bool:
    return any(name.startswith(top + ".") for top in tops)
