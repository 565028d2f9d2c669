"""Parameter groups as torch's optimizers take them, checked: each must name parameters of the
model.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.full.placement import placement_of


def read_groups(params: ParamsT) -> list[dict[str, Any]]:
    """Return groups whose "params" are lists, with "param_names" if they came with names.

    Parameters
    ----------
    params
        Parameters, pairs of name and parameter, or groups of either, whose "params" may be a single
        one.
    """
    # Torch refuses a single tensor, and writes into groups.
    copied: Any = (
        params
        if isinstance(params, Tensor)
        else [dict(x) if isinstance(x, dict) else x for x in params]
    )
    return torch.optim.Optimizer(copied, {}).param_groups


def known_groups(
    params: ParamsT, names: Mapping[nn.Parameter, str], model: str
) -> list[dict[str, Any]]:
    """Return groups over a model's parameters.

    A slice counts as the parameter from which it was cut.

    Raises
    ------
    ValueError
        If something is no parameter of the `model`, whose parameters have these `names`.
    """
    groups = read_groups(params)
    for number, group in enumerate(groups):
        group["params"] = [
            parameter if (whole := placement_of(parameter).sliced) is None else whole
            for parameter in group["params"]
        ]
        for at, parameter in enumerate(group["params"]):
            if parameter not in names:
                name = group["param_names"][at] if "param_names" in group else f"parameter {at}"
                fault = (
                    f"{name} of group {number}, of shape {list(parameter.shape)}, is no parameter "
                    f"of {model}"
                )
                raise ValueError(
                    f"{fault}: build the optimizer over the parameters of the model that was "
                    "wrapped"
                )
    return groups


def chosen(
    group: dict[str, Any], parameters: Mapping[nn.Parameter, nn.Parameter]
) -> dict[str, Any]:
    """Return a group with each parameter replaced by what `parameters` says, and without those it
    does not name.
    """
    places = [at for at, parameter in enumerate(group["params"]) if parameter in parameters]
    lists = {"params": [parameters[group["params"][at]] for at in places]}
    if "param_names" in group:
        lists["param_names"] = [group["param_names"][at] for at in places]
    return group | lists
