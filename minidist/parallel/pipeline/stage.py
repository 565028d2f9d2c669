"""Stages of a pipeline: a serial model cut between its layers, from outside.

    stage 0   embedding │ layers.0 │ layers.1 │
    stage 1             │ layers.2 │ layers.3 │
    stage 2                        │ layers.4 │ norm │ head

What a stage does not have is replaced by the identity, so the model's own forward runs, and what its embedding would be
given is what the stage before returned. Names of parameters stay those of the serial model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
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


def take_stages(model: nn.Module, parts: Sequence[range], mine: Sequence[int]) -> dict[int, nn.Module]:
    """Leave in `model` what this rank's stages need, and return the module of each stage.

    Parameters
    ----------
    model : nn.Module
        Serial; changed. Calls its `embedding`, its list of `layers`, its `norm` and its `head`, as our GPT does. A rank
        of one stage computes with the model itself, one of several with views of it that share its modules. Of a
        parameter that the first and the last stage share, both keep a copy: see `tied_names`.
    parts : sequence of ranges
        The layers of every stage, see `balance`.
    mine : sequence of int
        Which stages are this rank's.

    Raises
    ------
    ValueError
        If the model has no such list of layers, or of another length.
    """
    layers, needed = getattr(model, "layers", None), parts[-1].stop
    if not isinstance(layers, nn.ModuleList) or len(layers) != needed:
        found = f"{len(layers)} of them" if isinstance(layers, nn.ModuleList) else "no nn.ModuleList of that name"
        raise ValueError(f"{type(model).__name__} is to be cut into {needed} layers, but has {found}")
    stages = {stage: _keep(_view(model), parts[stage], needed) for stage in mine}
    _keep(model, [layer for stage in mine for layer in parts[stage]], needed)
    return stages if len(mine) > 1 else {mine[0]: model}


def _view(model: nn.Module) -> nn.Module:
    """Return another module with the same parts, whose hooks are its own."""
    view = copy.copy(model)
    view._forward_pre_hooks = view._forward_pre_hooks.copy()
    view._forward_hooks = view._forward_hooks.copy()
    return view


def _keep(model: nn.Module, layers: Collection[int], count: int) -> nn.Module:
    """Leave these of `count` layers, which keep their numbers, and so their parameters their names; and their ends."""
    kept = nn.ModuleList()
    kept._modules = {str(index): model.get_submodule(f"layers.{index}") for index in layers}
    ends = {"embedding": 0, "norm": count - 1, "head": count - 1}  # beside which layer
    gone = {name: nn.Identity() for name, layer in ends.items() if layer not in layers}
    model._modules = {**model._modules, "layers": kept, **gone}
    return model


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several. Ask before `take_stages`."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tuple(several) for several in names.values() if len(several) > 1]
