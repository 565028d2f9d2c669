"""Which units of ZeRO-3 a model has, and the precision of each.

By default the elements of module lists are units, such as a GPT's layers. All other parameters are
the root unit's.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from minidist.full.precision.mixed import check_dtype


@dataclass(frozen=True)
class MixedPrecision:
    """Which dtype is used where; None is the model's.

    Shards and the optimizer's state always have the model's.

    Attributes
    ----------
    parameters : torch.dtype, optional
        The dtype of gathered parameters. Inputs are cast to it, so computing and activations have
        it as well.
    reduction : torch.dtype, optional
        The dtype of gradients while they are summed over ranks; by default that of `parameters`.
    output : torch.dtype, optional
        The dtype of what the model returns.
    """

    parameters: torch.dtype | None = None
    reduction: torch.dtype | None = None
    output: torch.dtype | None = None


Policy: TypeAlias = Callable[[nn.Module], bool]
Precision: TypeAlias = MixedPrecision | Callable[[nn.Module], MixedPrecision] | None
# never called themselves
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def precision_of(
    module: nn.Module, precision: Precision, root: bool, device: torch.device
) -> MixedPrecision:
    """Return the precision of a unit.

    In one that is given for all units, `output` means the model's output.

    Raises
    ------
    ValueError
        If the device cannot compute in it; see `check_dtype`.
    """
    chosen = precision(module) if callable(precision) else precision or MixedPrecision()
    for dtype in (chosen.parameters, chosen.reduction, chosen.output):
        if dtype is not None:
            check_dtype(dtype, device)
    return chosen if root or callable(precision) else replace(chosen, output=None)


def split(
    model: nn.Module, policy: Policy | None
) -> list[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Return the units as (name, module, parameters), in the order of the modules, and the root
    last.

    A parameter that several units use belongs to the root, whose parameters stay whole all the
    time.

    Raises
    ------
    ValueError
        If the policy chooses nothing, a module inside another that it chose, or one that is never
        called.
    """
    if policy is None:
        blocks = set(_blocks(model, isinstance(model, nn.Sequential))) or set(model.children())
        wanted = {block for block in blocks if not isinstance(block, CONTAINERS)}
    else:
        wanted = set(filter(policy, model.modules()))
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if name and module in wanted and any(True for _ in module.parameters())
    ]
    if policy is not None:
        _check(model, chosen)
    users = Counter(parameter for _, module in chosen for parameter in set(module.parameters()))
    units = []
    within: set[nn.Parameter] = set()
    for name, module in chosen:
        mine = [parameter for parameter in module.parameters() if users[parameter] == 1]
        units.append((name, module, mine))
        within.update(mine)
    rest = [parameter for parameter in model.parameters() if parameter not in within]
    return [*units, ("", model, rest)]


def _blocks(module: nn.Module, in_list: bool) -> Iterator[nn.Module]:
    """Yield the elements of module lists, and of each `Sequential` that is not such an element
    itself.
    """
    for child in module.children():
        is_list = isinstance(child, nn.ModuleList) or (
            isinstance(child, nn.Sequential) and not in_list
        )
        if in_list and not is_list:
            yield child
        else:
            yield from _blocks(child, is_list)


def _check(model: nn.Module, chosen: list[tuple[str, nn.Module]]) -> None:
    if not chosen:
        raise ValueError(
            f"the policy chooses no module with parameters of this {type(model).__name__}, so all "
            "of them would be gathered at once: choose its blocks, or leave the policy out"
        )
    for name, module in chosen:
        if isinstance(module, CONTAINERS):
            raise ValueError(
                f"the policy chooses {name}, a {type(module).__name__}, which is never called "
                "itself, so nobody would gather it: choose its elements"
            )
        for outer, around in chosen:
            if around is not module and any(below is module for below in around.modules()):
                parameter = next(parameter for parameter, _ in module.named_parameters(prefix=name))
                raise ValueError(
                    f"the policy wraps {parameter} twice, in {name} and in {outer} around it, and "
                    "two units would gather it: choose one"
                )


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Return nested `values` with all floating-point tensors in `dtype`."""
    return tree_map_only(
        Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values
    )
