"""The state of a sharded optimizer, saved as that of an unsharded one, which any number of ranks can load.

    state_dict()        each rank's slices  ─▶ all-gather ─▶ whole tensors, in the parameters' shapes
    load_state_dict()   whole tensors       ─▶ each rank cuts out its slices

State of a slice that has a dim is one number per element (AdamW's moments). State without a dim is the same on every
rank (the count of steps). In the whole state this is less clear, since the moments of a parameter without dims have no
dim either. There the name decides: it is one of torch's counts, or has no dim even for a parameter that has some.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from minidist.collectives import all_gather
from minidist.parallel.placement import Placement, placement_of

COUNTS = frozenset({"step", "mu_product", "eta", "mu"})  # of torch's optimizers; the last three NAdam's and ASGD's


def share_out(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer over slices save and load the state of an unsharded one.

    Saving is collective then: a roll call and an all-gather for each tensor that has a dim. Loading sends nothing.
    """
    optimizer.register_state_dict_post_hook(_whole)
    optimizer.register_load_state_dict_pre_hook(_cut)


def _whole(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    placements = _placements(optimizer)
    return _changed(saved, lambda index, _, value: _gathered(value, placements[index]))


def _cut(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    placements = _placements(optimizer)
    same = _same_everywhere(saved, placements)
    check_state(saved, placements, same)
    return _changed(saved, lambda index, name, value: _slice(value, placements[index], name in same))


def _changed(saved: dict[str, Any], change: Callable[[int, str, Any], Any]) -> dict[str, Any]:
    """Return saved state with every `value` changed: `change(index, name, value)`."""
    parts = saved["state"].items()
    state = {index: {name: change(index, name, value) for name, value in held.items()} for index, held in parts}
    return saved | {"state": state}


def _same_everywhere(saved: dict[str, Any], placements: list[Placement]) -> frozenset[str]:
    """Return the names of state that is the same on every rank: it is not one number per element."""
    tensors = [
        (name, value.dim(), index)
        for index, held in saved["state"].items()
        for name, value in held.items()
        if isinstance(value, Tensor)
    ]
    with_dims = {name for name, dims, _ in tensors if dims}
    single = {name for name, dims, index in tensors if not dims and index < len(placements) and placements[index].shape}
    return COUNTS | (single - with_dims)


def _placements(optimizer: torch.optim.Optimizer) -> list[Placement]:
    found = [placement_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return [placement for placement in found if placement is not None]


def _gathered(value: Any, placement: Placement) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    counts = placement.comm.roll_call(len(value))
    return all_gather(value, placement.comm, counts=counts).reshape(placement.shape)


def _slice(value: Any, placement: Placement, same: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value if same else placement.take(value)).clone()


def check_state(saved: dict[str, Any], placements: list[Placement], same: Collection[str]) -> None:
    """Raise if a whole state is another model's. State whose name is in `same` has no shape to compare.

    Raises
    ------
    ValueError
        It names the parameters, with their shapes here and there.
    """
    wrong = []
    for index, held in saved["state"].items():
        here = placements[index] if index < len(placements) else None
        for name, value in held.items():
            if isinstance(value, Tensor) and name not in same and (here is None or value.shape != here.shape):
                mine = f"{here.name} {list(here.shape)}" if here else "no parameter"
                wrong.append(f"{name} of parameter {index} is {list(value.shape)} there, {mine} here")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"this optimizer state belongs to another model: {'; '.join(wrong[:3])}{more}")
