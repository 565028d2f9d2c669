"""A sharded model says so where torch would read or write its state, or run it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from minidist.full.ddp.backward import Hook, remove_all


class ClosedState:
    """Refuses `state_dict` and `load_state_dict` of a sharded model and of each part of it, until
    `remove`.

    Parameters
    ----------
    model : nn.Module
    strategy : str
        Who has sharded it, for errors.
    """

    def __init__(self, model: nn.Module, strategy: str) -> None:
        self.strategy, self.readable = strategy, False
        self.hooks: list[Any] = []
        for module in model.modules():  # a part's own state lacks values, as the whole one does
            self.hooks.append(module.register_state_dict_pre_hook(Hook(self._refuse_reading)))  # type: ignore[no-untyped-call]
            self.hooks.append(module.register_load_state_dict_pre_hook(Hook(self._refuse_writing)))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Refuse no more."""
        remove_all(self.hooks)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Allow `state_dict` in this context."""
        self.readable = True
        try:
            yield
        finally:
            self.readable = False

    def _refuse_reading(self, *_: Any) -> None:
        if not self.readable:
            raise TypeError(
                f"a rank has a part of what {self.strategy} sharded, so this would save NaN: use "
                "its full_state_dict()"
            )

    def _refuse_writing(self, *_: Any) -> None:
        raise TypeError(
            f"a rank has a part of what {self.strategy} sharded, so what is written here would be "
            "lost: use its load(state) instead"
        )


def leave(hooks: list[Any], model: nn.Module) -> None:
    """Take the hooks off a model whose strategy is gone, and refuse its use: its parameters cannot
    be gathered.
    """
    if hooks:
        remove_all(hooks)
        model.register_forward_pre_hook(_refuse, prepend=True)
        model.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(model: nn.Module, *_: object) -> NoReturn:
    raise gone(model)


def gone(model: nn.Module | None) -> RuntimeError:
    """Return the error for the use of a model whose parameters cannot be gathered any more."""
    return RuntimeError(
        f"the parameters of this {type(model).__name__} were shared out by a strategy that is gone"
        ": keep what wraps a model as long as the model is used, or call its unwrap() first"
    )
