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

KNOWN = {optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax}
KNOWN |= {optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.ASGD, optim.Rprop}


def build_over_slices(kind: Any, groups: list[dict[str, Any]], elementwise: bool, options: dict[str, Any]) -> Any:
    """Return an optimizer of a `kind` over slices, which saves and loads the state of an unsharded one.

    Raises
    ------
    ValueError
        If it is not known to treat each element separately, and `elementwise` does not say so.
    """
    made = partial(kind, **options)  # of a partial its function, with the arguments of both
    if made.func is optim.Muon:
        return SlicedMuon(groups, *made.args, **made.keywords)
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
        fault = f"{kind.__name__} is not known to treat each element for itself, and a rank has parts of parameters"
        known = ", ".join(sorted(one.__name__ for one in KNOWN))
        raise ValueError(f"{fault}: use {known} or Muon (ZeRO, without tensor parallelism), or pass elementwise=True")
