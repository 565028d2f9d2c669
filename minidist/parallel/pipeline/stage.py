"""Stages of a pipeline: a serial model cut between its layers, from outside.

    stage 0   embedding │ layers.0 │ layers.1 │
    stage 1             │ layers.2 │ layers.3 │
    stage 2                        │ layers.4 │ norm │ head

What a stage does not have is replaced by the identity, so the model's own forward runs, and what its embedding would be
given is what the stage before returned. Names of parameters stay those of the serial model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import cache

from torch import nn


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Return which layers belong to each stage: neighbours, at least one each, the most expensive stage the cheapest.

    Parameters
    ----------
    costs : sequence of float
        Of each layer, in any unit; equal ones give stages that differ by one layer at most.
    stages : int

    Raises
    ------
    ValueError
        If there are fewer layers than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {stages} stages of at least one: use fewer stages")

    @cache
    def best(first: int, left: int) -> tuple[float, float, int]:
        """Of `left` stages from layer `first` on: the largest cost, the sum of squares, where the first one ends."""
        if left == 1:
            return sum(costs[first:]), sum(costs[first:]) ** 2, len(costs)
        found = []
        for end in range(first + 1, len(costs) - left + 2):
            cost, (largest, squares, _) = sum(costs[first:end]), best(end, left - 1)
            found.append((max(cost, largest), cost**2 + squares, end))
        return min(found)

    parts: list[range] = []
    for left in range(stages, 0, -1):
        first = parts[-1].stop if parts else 0
        parts.append(range(first, best(first, left)[2]))
    return parts


def take_stages(
    model: nn.Module,
    parts: Sequence[range],
    mine: Sequence[int],
    list_name: str = "layers",
    before: Sequence[str] = ("embedding",),
    after: Sequence[str] = ("norm", "head"),
) -> dict[int, nn.Module]:
    """Leave in `model` what this rank's stages need, and return the module of each stage.

    Parameters
    ----------
    model : nn.Module
        Serial; changed. A rank of one stage computes with the model itself, one of several with views of it that share
        its modules. Of a parameter that the first and the last stage share, both keep a copy: see `tied_names`.
    parts : sequence of ranges
        The layers of every stage, see `balance`.
    mine : sequence of int
        Which stages are this rank's.
    list_name : str
        Of the `nn.ModuleList` of layers.
    before, after : sequences of str
        What the model calls before the first and after the last layer.

    Raises
    ------
    ValueError
        If the model has no such list of layers, or of another length.
    """
    blocks = getattr(model, list_name, None)
    needed = parts[-1].stop
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != needed:
        found = f"{len(blocks)} of them" if isinstance(blocks, nn.ModuleList) else "no nn.ModuleList of that name"
        raise ValueError(
            f"{type(model).__name__} is to be cut into {needed} {list_name}, but has {found}: name its list of blocks "
            "with list_name="
        )
    stages = {stage: _only(_view(model), parts[stage], list_name, before, after) for stage in mine}
    if len(stages) == 1:
        return {mine[0]: _only(model, parts[mine[0]], list_name, before, after)}
    ends = (before if 0 not in mine else ()), (after if len(parts) - 1 not in mine else ())
    _keep(model, [layer for stage in mine for layer in parts[stage]], list_name, [*ends[0], *ends[1]])
    return stages


def _view(model: nn.Module) -> nn.Module:
    """Return another module with the same parts, whose hooks are its own."""
    view = copy.copy(model)
    view._forward_pre_hooks = view._forward_pre_hooks.copy()
    view._forward_hooks = view._forward_hooks.copy()
    return view


def _only(model: nn.Module, layers: range, list_name: str, before: Sequence[str], after: Sequence[str]) -> nn.Module:
    """Leave in a model one stage."""
    last = len(getattr(model, list_name)) - 1
    _keep(model, layers, list_name, [*before] * (layers[0] > 0) + [*after] * (layers[-1] < last))
    return model


def _keep(model: nn.Module, layers: Iterable[int], list_name: str, without: Sequence[str]) -> None:
    """Leave these layers, which keep their numbers, and so their parameters their names; make `without` identities."""
    kept = nn.ModuleList()
    kept._modules = {str(index): getattr(model, list_name)[index] for index in layers}
    model._modules = {**model._modules, list_name: kept, **{name: nn.Identity() for name in without}}


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several. Ask before `take_stages`."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tuple(several) for several in names.values() if len(several) > 1]
