"""Which units of ZeRO-3 a model has, and the precision of each.

By default the elements of module lists are units, such as a GPT's layers. All other parameters are
the root unit's.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn

from minidist.memory.precision.mixed import check_dtype
from minidist.parallel.placement import expert_groups_of
from minidist.parallel.sharded.units import MixedPrecision

Policy: TypeAlias = Callable[[nn.Module], bool]
Precision: TypeAlias = MixedPrecision | Callable[[nn.Module], MixedPrecision] | None
# never called themselves
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def precision_of(
    module: nn.Module, precision: Precision, root: bool, device: torch.device
) -> MixedPrecision:
    """Return the precision of a unit. In one that is given for all units, `output` means the
    model's output.

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
    blocks = set(_blocks(model, isinstance(model, nn.Sequential))) or set(model.children())
    blocks = {block for block in blocks if not isinstance(block, CONTAINERS)}
    wanted = policy or blocks.__contains__
    named = [(name, module) for name, module in model.named_modules() if name and wanted(module)]
    chosen = [(name, module) for name, module in named if any(True for _ in module.parameters())]
    if policy is not None:
        _check(model, chosen)
    users = Counter(parameter for _, module in chosen for parameter in set(module.parameters()))
    units = [
        (name, module, [p for p in module.parameters() if users[p] == 1]) for name, module in chosen
    ]
    within = {parameter for _, _, parameters in units for parameter in parameters}
    return [
        *units,
        ("", model, [parameter for parameter in model.parameters() if parameter not in within]),
    ]


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
            f"the policy chooses no module with parameters of this {type(model).__name__}: "
            "choose its blocks"
        )
    for name, module in chosen:
        if isinstance(module, CONTAINERS):
            kind = type(module).__name__
            raise ValueError(
                f"the policy chooses {name}, a {kind}, which is never called itself: choose its "
                "elements"
            )
        for outer, around in chosen:
            if around is not module and any(below is module for below in around.modules()):
                parameter = next(parameter for parameter, _ in module.named_parameters(prefix=name))
                raise ValueError(
                    f"the policy wraps {parameter} twice, in {name} and in {outer} around it: "
                    "choose one"
                )


def check_layers(layers: Sequence[nn.Module], stage: int) -> None:
    """Raise ValueError if `PlainZeRO` cannot cut these layers into a shard each."""
    if stage not in (1, 2, 3):
        raise ValueError(f"stage={stage}: ZeRO has the stages 1, 2 and 3")
    users = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    if any(map(expert_groups_of, users)):
        fault = (
            "ranks have shared out the experts of a layer, which PlainZeRO would cut over all ranks"
        )
        raise ValueError(f"{fault}: use ZeRO1 or FSDP")
    for number, layer in enumerate(layers):
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        if len({parameter.dtype for parameter in trained}) != 1 or any(
            users[parameter] > 1 for parameter in trained
        ):
            raise ValueError(
                f"layer {number}, a {type(layer).__name__}, has nothing to train, more than one "
                "dtype, or a parameter of another layer: join it with that or a neighbour in an "
                "nn.Sequential, or use FSDP"
            )
