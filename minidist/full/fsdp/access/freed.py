"""Parameters between the uses of their unit: they have a shape and a gradient, but no values.

    weight.shape, weight.numel(), weight.grad       as ever
    weight.sum(), linear(x), weight.data.mul_(2)    RuntimeError: "blocks.0.weight is freed between ..."

FSDP frees the memory of a unit's parameters, and what they show meanwhile is NaN. A line that read
them would go on with NaN, and a line that wrote into them would write in vain, both without a word.
So a freed parameter is of a class that answers `ABOUT_SHAPE`, and refuses everything else.
While its unit is in use it is of its own class again, and torch pays nothing for this.
"""

from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from minidist.full.gradients.questions import ABOUT_SHAPE, name_of, operation
from minidist.full.placement import mixed

COMPILED = (
    "{} would compile the hooks of FSDP, too, and read parameters before they are gathered: call "
    "compile_blocks(model.layers) instead, before or after wrapping"
)


VIEWS = (".data", ".T", ".mT", ".H", ".mH", ".real", ".imag")


class FreedParameter(nn.Parameter):
    """A parameter without memory.

    Asked for its values, or to change them, it raises RuntimeError.
    """

    freed_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what needs no values."""
        kwargs = kwargs or {}
        name = operation(func)
        asks_type = func is torch.Tensor.type and len(args) == 1
        reads = func.__name__ == "__get__" and name not in VIEWS  # No attribute needs values.
        # torch.compile asks for `_is_view` before all else.
        if name != "is_view" and (name in ABOUT_SHAPE or reads or asks_type):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        freed = next(
            value for value in tree_leaves((args, kwargs)) if isinstance(value, FreedParameter)
        )
        return refuse(freed.freed_name, name_of(func))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return what can be said of it."""
        return f"{self.freed_name}: a freed parameter of shape {list(self.shape)}, {self.dtype}"


def refuse(parameter: str, what: str) -> NoReturn:
    """Raise RuntimeError for what needs the values of a freed parameter, or asks autograd for it."""
    if what in ("backward", "grad"):
        raise RuntimeError(
            f"{what} was asked for the gradient of {parameter} by name, but FSDP reduces the "
            "gradients of all that is trained: call backward() without inputs=, and freeze the "
            "others by requires_grad_(False) before wrapping"
        )
    if what == "_is_view":  # torch.compile asks for it before all else
        raise RuntimeError(COMPILED.format("torch.compile"))
    raise RuntimeError(
        f"{parameter} is freed between the forwards of its unit, so {what!r} would find NaN, and "
        "what is written there would be lost: read it in gathered() or full_state_dict(), change "
        "it by load(), resize, convert or move a model before wrapping it, and name other methods "
        "than forward by register_fsdp_forward_method(unit, method)"
    )


def hide(parameter: nn.Parameter, name: str) -> None:
    """Let a parameter, whose memory is freed, say so when it is asked for its values.

    Autograd does not ask: it has saved views of the memory. But it compares their version before it
    reads them, so it raises, too.
    """
    if not isinstance(parameter, FreedParameter):
        change_version(parameter, 1)
        parameter.freed_name = name  # type: ignore[attr-defined]
        parameter.__class__ = mixed(FreedParameter, type(parameter))


def reveal(parameter: nn.Parameter) -> None:
    """Let a parameter be what it was before `hide`."""
    if isinstance(parameter, FreedParameter):
        parameter.__class__ = type(parameter).__bases__[-1]
        del parameter.freed_name
        change_version(parameter, -1)


def change_version(parameter: nn.Parameter, by: int) -> None:
    """Let what autograd has saved of a parameter be invalid, or valid again."""
    if not parameter.is_inference():
        version = parameter._version + by
        torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))
