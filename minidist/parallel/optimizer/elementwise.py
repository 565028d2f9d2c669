"""Which optimizers may update slices: those that treat each element of a parameter separately.

A slice is some neighbouring elements of a parameter. AdamW updates them as it would in the whole parameter. Others look
at rows, columns or all of a matrix (Adafactor, Shampoo, LBFGS): on slices they would compute something else.
"""

from functools import partial
from typing import Any

from torch import optim

from minidist.memory.precision.masters import MasterWeights
from minidist.parallel.optimizer.muon import SlicedMuon
from minidist.parallel.optimizer.state import share_out

KNOWN = frozenset(
    (
        *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
        *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.ASGD, optim.Rprop),
    )
)


def build_over_slices(kind: Any, groups: list[dict[str, Any]], elementwise: bool, options: dict[str, Any]) -> Any:
    """Return an optimizer of a `kind` over slices, which saves and loads the state of an unsharded one.

    Raises
    ------
    ValueError
        If it is not known to treat each element separately, and `elementwise` does not say so.
    """
    if isinstance(kind, partial) and kind.func is optim.Muon:
        return SlicedMuon(groups, *kind.args, **kind.keywords | options)
    if kind is optim.Muon:
        return SlicedMuon(groups, **options)
    if isinstance(kind, type):
        _check(kind, elementwise)  # before it complains about the shapes of slices
    optimizer = kind(groups, **options)
    check_elementwise(optimizer, elementwise)
    share_out(optimizer)
    return optimizer


def check_elementwise(optimizer: optim.Optimizer, said: bool) -> None:
    """Raise ValueError unless an optimizer is known, or `said`, to treat each element separately."""
    _check(type(optimizer), said)
    if isinstance(optimizer, MasterWeights):
        _check(optimizer.inner, said)


def _check(kind: type, said: bool) -> None:
    if not said and kind not in KNOWN and not vars(kind).get("elementwise"):
        raise ValueError(
            f"{kind.__name__} is not known to treat each element for itself, and a rank has parts of parameters: an "
            "optimizer that looks at rows or whole matrices would compute something else. Use one of "
            f"{', '.join(sorted(one.__name__ for one in KNOWN))}, or Muon (with ZeRO, without tensor parallelism), or "
            "pass elementwise=True if it does so"
        )
