"""Methods that are not `forward`: a unit's parameters are to be whole in these, too.

    model = FSDP(autoencoder, comm, op="mean")
    register_fsdp_forward_method(model.module.encoder, "encode")     the line is torch's
    model.module.encoder.encode(x)                                   gathers, encodes, frees

Hooks hear of `module(x)` and of nothing else. What is called otherwise finds freed parameters, and
they say so (`freed.py`).
"""

from __future__ import annotations

import weakref
from functools import update_wrapper
from typing import Any

from torch import nn

from minidist.full.fsdp.access.closed import gone
from minidist.full.fsdp.passes import Passes, UnitHook
from minidist.full.fsdp.unit import Unit


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a unit gather the unit's parameters before it runs, and free them after it,
    as `forward` does.

    All ranks must call it together, in evaluation and in training. `unwrap` ends it.

    Parameters
    ----------
    module : nn.Module
        A unit of a model that `FSDP` has wrapped, or this model itself: the `module` of what `FSDP`
        has returned.
    method_name : str
        The method returns what the loss needs: tensors, or tuples, lists or dictionaries of them.

    Raises
    ------
    ValueError
        If the module is no unit of an FSDP model, or has no such method.
    """
    hook = next(
        (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, UnitHook)), None
    )
    before: Any = hook.method() if hook else None
    kind = type(module).__name__
    if hook is None or before is None:
        raise ValueError(
            f"this {kind} is no unit of an FSDP model, so nothing knows when {method_name} needs "
            "its parameters: wrap the model first, and name a unit that its policy chooses, or its "
            ".module"
        )
    if not callable(getattr(module, method_name, None)):
        raise ValueError(
            f"a {kind} has no method {method_name!r} to gather its parameters for: name one that "
            "it has"
        )
    if not isinstance(module.__dict__.get(method_name), AsForward):
        passes, unit = before.__self__, hook.first[0]()
        assert unit is not None, "its passes have it"
        passes.hooks.append(AsForward(passes, unit, method_name))


class AsForward:
    """Stands in place of a unit's method, as an attribute of the unit, until it is removed."""

    def __init__(self, passes: Passes, unit: Unit, name: str) -> None:
        self.passes, self.unit = weakref.ref(passes), weakref.ref(unit)
        self.module, self.name = weakref.ref(unit.module), name
        self.before = unit.module.__dict__.get(name)  # a function that somebody else has put there
        self.method = getattr(unit.module, name)
        update_wrapper(self, self.method)
        setattr(unit.module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method as if it were the unit's forward."""
        passes, unit = self.passes(), self.unit()
        if passes is None or unit is None:
            raise gone(self.module())
        return passes.as_forward(unit, self.method, args, kwargs)

    def remove(self) -> None:
        """Put the method back."""
        if (module := self.module()) is not None:
            module.__dict__.pop(self.name, None)
            if self.before is not None:
                setattr(module, self.name, self.before)
