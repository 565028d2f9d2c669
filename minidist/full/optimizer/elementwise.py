"""Which optimizers may update slices: those that treat each element of a parameter separately.

A slice is some neighbouring elements of a parameter. AdamW updates them as it would in the whole
parameter. Others look at rows, columns or all of a matrix (Adafactor, Shampoo, LBFGS): on slices
they would compute something else.
"""

from typing import Any

from torch import optim

from minidist.full.optimizer.state import share_out
from minidist.full.placement import placement_of
from minidist.full.precision.masters import MasterWeights

KNOWN = {optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax}
KNOWN |= {optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.ASGD, optim.Rprop}


def build_over_slices(
    kind: Any, groups: list[dict[str, Any]], elementwise: bool, options: dict[str, Any]
) -> Any:
    """Return an optimizer of a `kind` over slices, which saves and loads the state of an unsharded
    one.

    Raises
    ------
    ValueError
        If it is not known to treat each element separately, and `elementwise` does not say so.
    """
    if isinstance(kind, type):
        _check(kind, elementwise)  # before it complains about the shapes of slices
    optimizer = kind(groups, **options)
    check_elementwise(optimizer, elementwise)
    share_out(optimizer)
    return optimizer


def check_elementwise(optimizer: optim.Optimizer, said: bool) -> None:
    """Raise ValueError unless an optimizer is known, or `said`, to treat each element separately.

    What is said is noted, for `check_blocks`.
    """
    for kind in _kinds(optimizer):
        _check(kind, said)
    if said:
        optimizer.elementwise = True  # type: ignore[attr-defined]


def check_blocks(optimizer: optim.Optimizer, _: object = None) -> None:
    """Raise ValueError if an optimizer that is not known, or said, to be elementwise would update a
    block by hand.

    Slices of blocks are passed over: the strategy that has made them has checked the optimizer.
    """
    if vars(optimizer).get("elementwise") or all(map(_known, _kinds(optimizer))):
        return
    kind = type(optimizer).__name__
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        placement = placement_of(parameter)
        block = placement.block
        if block is not None and block.dim is not None and placement.slice is None:
            raise ValueError(
                f"{kind} is not known to treat each element for itself, and this rank has only a "
                f"block of {block.name} {list(block.shape)}, so its step would differ from that of "
                f"the whole: use {_names()}, or say {kind}.elementwise = True if it does so"
            )


def _kinds(optimizer: optim.Optimizer) -> list[type]:
    """Return the class of an optimizer, and that of the one inside it."""
    inside = [optimizer.inner] if isinstance(optimizer, MasterWeights) else []
    return [type(optimizer), *inside]


def _known(kind: type) -> bool:
    return kind in KNOWN or bool(vars(kind).get("elementwise"))


def _names() -> str:
    return ", ".join(sorted(kind.__name__ for kind in KNOWN))


def _check(kind: type, said: bool) -> None:
    if not said and not _known(kind):
        fault = (
            f"{kind.__name__} is not known to treat each element for itself, and a rank has parts "
            "of parameters"
        )
        raise ValueError(f"{fault}: use {_names()}, or pass elementwise=True")
