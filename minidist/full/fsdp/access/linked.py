"""Sharded parameters: their `grad` is the gradient of this rank's slice.

parameter.grad             that of the slice, once it is reduced: to be clipped, scaled, logged
parameter._grad            that of the whole parameter, which autograd writes; reduced, it is gone
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from minidist.full.fsdp.access.freed import FreedParameter
from minidist.full.optimizer.over_slices import Owner
from minidist.full.placement import mixed


class ShardedParameter(nn.Parameter):
    """A parameter whose `grad` is the gradient of this rank's slice: what is clipped, scaled and
    logged.

    The parameter's own gradient, which autograd writes, is in `_grad`. It is here while it waits to
    be reduced. Copies, in memory or in a file, are parameters as they were before.
    """

    strategy: weakref.ref[Owner]

    @property
    def grad(self) -> Tensor | None:
        """The gradient of this rank's slice, flat, or None."""
        strategy = self.strategy()
        return self._grad if strategy is None else strategy.gradient_of(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        """Forget the gradient.

        Raises ValueError for another one: nobody would reduce it, or step by it.
        """
        strategy = self.strategy()
        if strategy is None:
            self._grad = gradient
        elif gradient is None:
            strategy.forget_gradients({self})
        elif gradient is not self.grad:  # `p.grad += x` sets what it has changed in place
            raise ValueError(
                "the gradient of this parameter is that of a slice of "
                f"{type(strategy).__name__}, so another tensor in its place would change nothing: "
                "change it in place (parameter.grad.mul_(2), .copy_(...)), or set it to None"
            )

    @grad.deleter
    def grad(self) -> None:
        """Forget the gradient, as `del` does with torch's parameters."""
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a copy that no strategy has sharded."""
        copied = deepcopy(self.unlinked(), memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a parameter that no strategy has sharded."""
        return self.unlinked().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def unlinked(self) -> nn.Parameter:
        """Return a parameter of the kind that this one was, on the same memory."""
        kind = type(self).__bases__[-1]
        twin: nn.Parameter = Tensor._make_subclass(kind, self.data, self.requires_grad)
        twin.__dict__.update(
            {name: value for name, value in vars(self).items() if name != "strategy"}
        )
        return twin


def updated(parameter: nn.Parameter) -> nn.Parameter:
    """Return what an optimizer updates of a parameter: this rank's slice of it, if it is sharded."""
    asked = getattr(parameter, "strategy", None)  # what a `ShardedParameter` has
    strategy = None if asked is None else asked()
    piece: nn.Parameter = parameter if strategy is None else strategy.slice_of(parameter)
    return piece


class LinkedGradients:
    """Makes each parameter a `ShardedParameter`, until `remove`.

    Keeps neither parameters nor strategy alive.
    """

    def __init__(self, strategy: Owner, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [(weakref.ref(parameter), type(parameter)) for parameter in parameters]
        for parameter in parameters:
            parameter.__class__ = mixed(ShardedParameter, type(parameter))
            parameter.strategy = weakref.ref(strategy)  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Let the parameters be what they were; those that are freed say so for ever."""
        for reference, kind in self.parameters:
            parameter = reference()
            if parameter is not None:
                gone = isinstance(parameter, FreedParameter)
                parameter.__class__ = mixed(FreedParameter, kind) if gone else kind
                del parameter.strategy  # type: ignore[attr-defined]
