"""Stages of a pipeline: a serial model cut between its layers, from outside.

    stage 0   embedding │ layers.0 │ layers.1 │
    stage 1             │ layers.2 │ layers.3 │
    stage 2                        │ layers.4 │ norm │ head

An identity replaces each module that a stage does not have. So the model's own forward runs, and
takes the output of the stage before in place of tokens. Parameters keep the names that they have in
the serial model.
"""

import copy
from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise

from torch import nn


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Return the layers of each stage: neighbours, cut so that the most expensive stage is as cheap
    as possible.

    Parameters
    ----------
    costs : sequence of float
        Of each layer, in any unit. With equal costs, stages differ by one layer at most.
    stages : int
        How many stages; each gets at least one layer.

    Raises
    ------
    ValueError
        If there are fewer layers than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(
            f"{len(costs)} layers cannot be cut into {stages} stages of at least one: use fewer "
            "stages"
        )

    @cache
    def best(first: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """Of `left` stages from layer `first` on: the largest cost, the sum of squares, and where
        the stages end.
        """
        if left == 1:
            return sum(costs[first:]), sum(costs[first:]) ** 2, (len(costs),)
        found = []
        for end in range(first + 1, len(costs) - left + 2):
            cost, (largest, squares, ends) = sum(costs[first:end]), best(end, left - 1)
            found.append((max(cost, largest), cost**2 + squares, (end, *ends)))
        return min(found)

    _, _, ends = best(0, stages)
    return [range(first, end) for first, end in pairwise((0, *ends))]


def take_stages(
    model: nn.Module, parts: Sequence[range], mine: Sequence[int]
) -> dict[int, nn.Module]:
    """Leave in `model` only what this rank's stages need, and return the module of each stage.

    Parameters
    ----------
    model : nn.Module
        The serial model, which is changed. Its forward calls `embedding`, `layers`, `norm` and
        `head`, as our GPT's does. A rank with one stage computes with the model itself, and a rank
        with several stages with views that share its modules. If the first and the last stage share
        a parameter, each keeps a copy: see `tied_names`.
    parts : sequence of ranges
        The layers of every stage; see `balance`.
    mine : sequence of int
        Which stages are this rank's.

    Raises
    ------
    ValueError
        If the model has no `nn.ModuleList` called `layers`, or one of another length.
    """
    layers, needed = getattr(model, "layers", None), parts[-1].stop
    if not isinstance(layers, nn.ModuleList) or len(layers) != needed:
        found = (
            f"{len(layers)} of them"
            if isinstance(layers, nn.ModuleList)
            else "no nn.ModuleList of that name"
        )
        raise ValueError(
            f"{type(model).__name__} is to be cut into {needed} layers, but has {found}"
        )
    stages = {stage: _keep(_view(model), parts[stage], needed) for stage in mine}
    _keep(model, [layer for stage in mine for layer in parts[stage]], needed)
    return stages if len(mine) > 1 else {mine[0]: model}


def _view(model: nn.Module) -> nn.Module:
    """Return another module with the same parts, and with its own lists of hooks."""
    view = copy.copy(model)
    view._forward_pre_hooks = view._forward_pre_hooks.copy()
    view._forward_hooks = view._forward_hooks.copy()
    return view


def _keep(model: nn.Module, layers: Collection[int], count: int) -> nn.Module:
    """Keep these of `count` layers, under their numbers, and the ends of the model that belong to
    them.
    """
    kept = nn.ModuleList()
    kept._modules = {str(index): model.get_submodule(f"layers.{index}") for index in layers}
    ends = {"embedding": 0, "norm": count - 1, "head": count - 1}  # beside which layer
    gone = {name: nn.Identity() for name, layer in ends.items() if layer not in layers}
    model._modules = {**model._modules, "layers": kept, **gone}
    return model


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several. Call this before `take_stages`."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tuple(several) for several in names.values() if len(several) > 1]
