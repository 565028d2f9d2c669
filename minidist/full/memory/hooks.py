"""Hooks that do not keep their strategy alive, and what they tell: a model has been wrapped
already.

What changes a model's parameters or layers (adapters, tensor parallelism, experts) comes before
what waits for their gradients (DDP, ZeRO, FSDP). The hooks that these leave on parameters are the
record of it.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class Hook:
    """A hook that calls `method(*first, ...)` as long as the method's object exists, and does
    nothing afterwards.

    Autograd keeps its hooks where Python's garbage collector cannot see them: a bound method there
    would live for ever. The arguments in `first` belong to the method's object, and live as long as
    it does. `whose` is the kind of strategy that waits, if it is not the method's own class.
    """

    def __init__(self, method: Callable[..., Any], *first: Any, whose: str = "") -> None:
        self.method, self.first = weakref.WeakMethod(method), [weakref.ref(it) for it in first]
        self.whose = whose

    def __call__(self, *others: Any) -> Any:
        """Call the method."""
        method = self.method()
        return None if method is None else method(*(it() for it in self.first), *others)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Be copied, with the module that it is on, as one that does nothing: the strategy knows
        only the original.
        """
        return ended, ()


def ended() -> Callable[..., None]:
    """Return a hook that does nothing."""
    return does_nothing


def does_nothing(*_: object) -> None:
    """Do nothing."""


def waiting_for(parameter: nn.Parameter) -> str:
    """Return the kind of strategy, which still exists, that waits for the gradient of a parameter;
    or nothing.
    """
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        method: Any = hook.method() if isinstance(hook, Hook) else None
        if method is not None:
            return hook.whose or type(method.__self__).__name__
    return ""


def check_unwrapped(model: nn.Module, step: str) -> None:
    """Raise ValueError if a strategy that waits for gradients was applied before a `step` that has
    to come first.
    """
    for name, parameter in model.named_parameters():
        if strategy := waiting_for(parameter):
            fault = (
                f"{strategy} waits for the gradient of {name} as it is, and {step} would change "
                "what is to come"
            )
            raise ValueError(
                f"{fault}: {step} comes before {strategy}, so call unwrap(), and wrap the model "
                "after it"
            )
