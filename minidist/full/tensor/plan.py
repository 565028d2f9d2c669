"""Tensor parallelism for a serial model, from outside: a plan says which module is split in which
style.

    parallelize_tensor(model, mesh.tp)                              our GPT
    parallelize_tensor(model, mesh.tp, sequence=True)               with the sequence split between the regions
    parallelize_tensor(mine, mesh.tp, {                             any model: patterns, `*` is one part of a name
        "blocks.*.mlp": ParallelRegion(),                           the input enters once, for both layers
        "blocks.*.mlp.gate": ColumnParallel(), "blocks.*.mlp.up": ColumnParallel(),
        "blocks.*.mlp.down": RowParallel(),
    })

Afterwards all ranks call the model with the same tokens. `state_dict` has the same names, and holds
slices; the record of each parameter (`placement_of`) says which slice.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from minidist.full.adapters.lora import linear_in
from minidist.full.comm import Communicator
from minidist.full.ddp.replicas import make_equal
from minidist.full.memory.hooks import check_unwrapped
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT, GPTConfig
from minidist.full.model.dropout import Dropout
from minidist.full.optimizer.guard import guard_blocks
from minidist.full.placement import (
    Block,
    placement_of,
    shard,
)
from minidist.full.precision.fp8 import scales_of
from minidist.full.recipe import Recipe
from minidist.full.strategy import Facts, Parallel, Strategy
from minidist.full.tensor.sequence import SequenceBoundary, split_dropout
from minidist.full.tensor.styles import (
    ColumnParallel,
    ParallelRegion,
    RowParallel,
    SplitTokens,
    Style,
    VocabularyParallel,
)
from minidist.full.tensor.tensor_parallel import Boundary, sum_gradient

Plan: TypeAlias = Mapping[str, Style]


class TensorParallelism(Strategy):
    """Leaves this rank's block of each matrix."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """Sequence parallelism needs several ranks along the tensor axis."""
        if recipe.sp and layout.tp == 1:
            yield (
                "sequence parallelism shares tokens out among the ranks of tensor parallelism: "
                "use tp=2"
            )

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """The tensor axis has several ranks."""
        return layout.tp > 1

    def check(self, model: nn.Module, mesh: Mesh, recipe: Recipe) -> Mapping[str, Style]:
        """Return the style of each module that is split, by its name."""
        return check_plan(model, mesh.tp, recipe.tensor_plan, recipe.sp)

    def apply(self, parallel: Parallel, checked: Mapping[str, Style]) -> None:
        """Split the model by these styles."""
        split(parallel.model, parallel.mesh.tp, checked, parallel.recipe.sp)

    def shares(self, recipe: Recipe, layout: Layout) -> dict[str, int]:
        """Sequence parallelism shares tokens out among the ranks of the tensor axis."""
        return {"sp": layout.tp} if recipe.sp else {}

    def words(self, recipe: Recipe, mesh: Mesh) -> str:
        """Say whether the sequence is split, too."""
        words = f"tp={mesh.tp.size}"
        return f"{words} (with sequence parallelism)" if recipe.sp else words


def gpt_plan(config: GPTConfig) -> Plan:
    """Return the plan for our GPT: attention by heads, MLPs by channels, embedding and head by
    words.

    Routed experts are not cut: each rank sends its share of the tokens to them.
    """
    key_value = ColumnParallel(heads=config.key_value_heads, shared=True)
    plan: dict[str, Style] = {
        "embedding": VocabularyParallel(),
        "layers.*.attention": ParallelRegion(),
        "layers.*.attention.query": ColumnParallel(heads=config.heads),
        "layers.*.attention.key": key_value,
        "layers.*.attention.value": key_value,
        "layers.*.attention.output": RowParallel(heads=config.heads),
        # its logits stay split: the loss is vocabulary_parallel_cross_entropy_sum
        "head": ColumnParallel(),
    }
    if config.experts:
        plan["layers.*.mlp.routed"] = SplitTokens()
    if config.shared_experts or not config.experts:
        mlp = "layers.*.mlp.shared" if config.experts else "layers.*.mlp"
        plan[mlp] = ParallelRegion()
        plan[f"{mlp}.gate"] = ColumnParallel()
        plan[f"{mlp}.up"] = ColumnParallel()
        plan[f"{mlp}.down"] = RowParallel()
    return plan


def parallelize_tensor(
    model: nn.Module, comm: Communicator, plan: Plan | None = None, sequence: bool = False
) -> None:
    """Split a model over the ranks of `comm`, in place. Collective.

    Parameters
    ----------
    model : nn.Module
        Serial, and built on every rank; all ranks get rank 0's values. Its forward keeps its
        signature. Optimizers that treat each element separately, built before or after, update this
        rank's slices. Others, such as Adafactor, are refused when they step: on slices they
        would compute something else.
    comm : Communicator
        The ranks of the tensor axis.
    plan : optional
        Styles by patterns of module names. By default `gpt_plan`, for a GPT.
    sequence : bool
        Split the sequence [B, T, D] along T between the regions. The plan then has a module that
        splits it first (`VocabularyParallel` or `SplitSequence`); T must be a multiple of the
        ranks.

    Raises
    ------
    ValueError, TypeError
        On every rank, before anything is sent, for a plan that does not fit the model or the number
        of ranks.
    MismatchError
        If the ranks have built different models; their values may differ.

    Cost: one broadcast of the model. For that of a step see `tensor_parallel.py` and `sequence.py`.
    """
    check_unwrapped(model, "parallelize_tensor")
    placements = map(placement_of, model.parameters())
    if any(placement.block and not placement.experts for placement in placements):
        raise ValueError(
            "the model has been split already: call parallelize_tensor once, on a serial model"
        )
    styles = check_plan(model, comm, plan, sequence)
    if comm.size > 1:
        make_equal(model, comm)
        split(model, comm, styles, sequence)


def split(model: nn.Module, comm: Communicator, styles: Plan, sequence: bool) -> None:
    """Split a model, which has the same values on all ranks, by styles from `check_plan`.

    Sends nothing.

    First each style is applied; then comes what no style names: whole parameters, and dropouts of a
    split sequence.
    """
    guard_blocks(model)
    boundary = SequenceBoundary(comm) if sequence else Boundary(comm)
    for name, style in styles.items():
        entered = any(around.enters for around in _around(name, styles))
        model.set_submodule(name, style.apply(model.get_submodule(name), name, boundary, entered))
    _replicate_the_rest(model, styles, comm, sequence)
    for module in model.modules():
        if sequence and isinstance(module, Dropout):
            split_dropout(module, comm)


def check_plan(
    model: nn.Module, comm: Communicator, plan: Plan | None, sequence: bool
) -> dict[str, Style]:
    """Return the style of each module that is split, by name.

    Sends nothing. Arguments as for `parallelize_tensor`.

    Raises
    ------
    ValueError, TypeError
        As `parallelize_tensor`.
    """
    if scales_of(model):
        reason = "a layer that is cut would multiply in its own dtype again"
        raise ValueError(
            f"the model multiplies in 8 bits already, and {reason}: to_fp8 comes after "
            "parallelize_tensor"
        )
    if plan is None:
        if not isinstance(model, GPT):
            raise TypeError(
                f"no plan is known for a {type(model).__name__}: pass plan={{pattern: style, ...}}"
            )
        plan = gpt_plan(model.config)
    styles = _matched(model, plan)
    cuts = {}
    for name, style in styles.items():
        module, kind = linear_in(model.get_submodule(name)), type(style).__name__
        if not isinstance(module, style.kind):
            fault = (
                f"{name} is of kind {type(module).__name__}, but {kind} splits "
                f"{style.kind.__name__}"
            )
            raise TypeError(f"{fault}: change the plan")
        cuts[name], _ = style.bounds(module, name, comm)
    uses: dict[nn.Parameter, tuple[str, object]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0].removesuffix(".base")
        use = cuts.get(owner) or _computes_some_terms(name, styles, sequence)
        first, before = uses.setdefault(parameter, (name, use))
        if use != before:
            fault = f"{first} and {name} are one parameter, but the plan treats their modules apart"
            raise ValueError(
                f"{fault}, so that one of them would compute with what the other leaves: give both "
                "styles that cut it alike, or untie them"
            )
    if sequence and not any(style.splits_sequence for style in styles.values()):
        fault = "sequence=True, but nothing in the plan splits the sequence"
        raise ValueError(f"{fault}: name the embedding, as VocabularyParallel() or SplitSequence()")
    return styles


def _replicate_the_rest(model: nn.Module, styles: Plan, comm: Communicator, sequence: bool) -> None:
    """Record whole parameters, and make backward sum their gradients where each rank computes some
    of the terms.
    """
    for name, parameter in model.named_parameters():
        if placement_of(parameter).block is None:
            shard(
                parameter,
                Block(name, parameter.shape, None, ((0, 0),) * comm.size, comm.size, comm),
            )
            if _computes_some_terms(name, styles, sequence):
                sum_gradient(parameter, comm)


def _computes_some_terms(name: str, styles: Plan, sequence: bool) -> bool:
    """Tell whether each rank sees some channels or some tokens where a whole parameter is used."""
    around = _around(name, styles)
    some_channels = any(style.enters for style in around) and not any(
        style.leaves for style in around
    )
    split = sequence or any(style.splits_tokens for style in around)
    some_tokens = split and not any(style.splits_sequence for style in around)
    return some_channels or some_tokens


def _matched(model: nn.Module, plan: Plan) -> dict[str, Style]:
    """Return the style of each module that a pattern names.

    Raises ValueError if none does, or two do.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, tuple[str, Style]] = {}
    for pattern, style in plan.items():
        matches = [name for name in names if _fits(name, pattern)]
        if not matches:
            fault = f"the plan names {pattern!r}, which no module of the model has"
            raise ValueError(
                f"{fault}: the names are such as {', '.join(names[:3])}, ..., {names[-1]}"
            )
        for name in matches:
            if name in found:
                raise ValueError(
                    f"{name} is named twice in the plan, by {found[name][0]!r} and by {pattern!r}"
                )
            found[name] = pattern, style
    return {name: style for name, (_, style) in found.items()}


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _around(name: str, styles: Plan) -> list[Style]:
    """Return the styles of the modules in which a module or parameter lies."""
    return [style for top, style in styles.items() if name.startswith(top + ".")]
