"""The state of a sharded optimizer, saved as that of an unsharded one, which any number of ranks
can load.

    state_dict()        each rank's slices  ─▶ all-gather ─▶ whole tensors, in the parameters' shapes
    load_state_dict()   whole tensors       ─▶ each rank cuts out its slices

State of a slice that has a dim is one number per element (AdamW's moments). State without a dim is
the same on every rank (the count of steps). In the whole state this is less clear, since the
moments of a parameter without dims have no dim either. There the name decides: it is one of torch's
counts, or has no dim even for a parameter that has some.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from minidist.full.collectives import all_gather
from minidist.full.placement import Slice, placement_of

# of torch's optimizers; the last three NAdam's and ASGD's
COUNTS = frozenset({"step", "mu_product", "eta", "mu"})


def share_out(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer over slices save and load the state of an unsharded one.

    Saving is collective then: a roll call and an all-gather for each tensor that has a dim. Loading
    sends nothing.
    """
    optimizer.register_state_dict_post_hook(_whole)
    optimizer.register_load_state_dict_pre_hook(_cut)


def _whole(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    placements = _placements(optimizer)

    def whole(at: int, name: str, value: Tensor) -> Tensor:
        return _gathered(value, placements[at])

    return _changed(saved, whole)


def _cut(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    placements = _placements(optimizer)
    same = _same_everywhere(saved, placements)
    check_state(saved, placements, same)

    def mine(at: int, name: str, value: Tensor) -> Tensor:
        if name not in same:
            value = placements[at].take(value)
        return value.clone()

    return _changed(saved, mine)


def _changed(saved: dict[str, Any], change: Callable[[int, str, Tensor], Tensor]) -> dict[str, Any]:
    """Return saved state with every tensor changed: `change(number of its parameter, name,
    value)`.
    """
    state = {index: dict(held) for index, held in saved["state"].items()}
    for index, name, value in _tensors(saved):
        state[index][name] = change(index, name, value)
    return saved | {"state": state}


def _same_everywhere(saved: dict[str, Any], placements: list[Slice]) -> frozenset[str]:
    """Return the names of state that is the same on every rank: it is not one number per
    element.
    """
    shaped = {index for index, placement in enumerate(placements) if placement.shape}
    with_dims: set[str] = set()
    single: set[str] = set()  # one number, though the parameter has dims
    for index, name, value in _tensors(saved):
        if value.dim():
            with_dims.add(name)
        elif index in shaped:
            single.add(name)
    return COUNTS | (single - with_dims)


def _tensors(saved: dict[str, Any]) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the number of its parameter, the name and the value of each tensor in saved state."""
    for index, held in saved["state"].items():
        for name, value in held.items():
            if isinstance(value, Tensor):
                yield index, name, value


def _placements(optimizer: torch.optim.Optimizer) -> list[Slice]:
    """Return which elements of its parameter each slice holds, in the optimizer's order."""
    placements = []
    for group in optimizer.param_groups:
        for piece in group["params"]:
            found = placement_of(piece).slice
            if found is not None:
                placements.append(found)
    return placements


def _gathered(value: Tensor, placement: Slice) -> Tensor:
    if value.dim() == 0:
        return value
    comm = placement.comm
    lengths = comm.all_gather_object(len(value))
    whole = all_gather(value, comm, counts=lengths)
    return whole.reshape(placement.shape)


def check_state(saved: dict[str, Any], placements: list[Slice], same: Collection[str]) -> None:
    """Raise if a whole state is another model's.

    State whose name is in `same` has no shape to compare.

    Raises
    ------
    ValueError
        It names the parameters, with their shapes here and there.
    """
    wrong = []
    for index, name, value in _tensors(saved):
        here = placements[index] if index < len(placements) else None
        if name not in same and (here is None or value.shape != here.shape):
            mine = f"{here.name} {list(here.shape)}" if here else "no parameter"
            wrong.append(f"{name} of parameter {index} is {list(value.shape)} there, {mine} here")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"this optimizer state belongs to another model: {'; '.join(wrong[:3])}{more}"
        )
