"""Hooks of strategies on a model and its backward. They do not keep the strategy alive, and vanish
with it.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minidist.comm import Communicator
from minidist.memory.hooks import Hook as Hook
from minidist.memory.hooks import waiting_for


def hooked(parameter: nn.Parameter) -> bool:
    """Tell whether a strategy that still exists waits for the gradient of a parameter."""
    return bool(waiting_for(parameter))


def kept_by_graph(kept: Any, output: Any) -> Any:
    """Return the nested `output`; its graph now keeps `kept` alive until a backward through it has
    ended.
    """
    held = [kept]
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(lambda _: at_end(held.clear))  # type: ignore[no-untyped-call]
    return output


def at_end(work: Callable[[], None]) -> None:
    """Call `work` when the backward that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(work)


def remove_all(hooks: list[Any]) -> None:
    """Remove all hooks in the list, and empty it."""
    while hooks:
        hooks.pop().remove()


class BackwardEnd:
    """Calls `work` once at the end of each backward in which `expect` was called."""

    def __init__(self, work: Callable[[], None], comm: Communicator) -> None:
        self.work, self.comm = weakref.WeakMethod(work), comm
        self._pending: weakref.ref[Callable[[], None]] | None = None

    def expect(self) -> bool:
        """Ask the backward that is running to call `work` when it ends. Tell whether it was asked
        for the first time.

        Raises
        ------
        RuntimeError
            If an earlier backward has raised, and so never came to its end.
        """
        if self._pending is not None and self._pending() is not None:
            return False
        if self._pending is not None and self.comm.size > 1:
            fault = (
                f"an earlier backward of rank {self.comm.rank} raised while others wait for its "
                "gradients"
            )
            raise RuntimeError(
                f"{fault}: end the job, or have all ranks build model and strategy anew"
            )

        work = self.work()
        assert work is not None, "its object asks"

        def end() -> None:
            self._pending = None
            work()

        # Only autograd keeps this callback, and drops it if backward raises, too: then our
        # reference is dead.
        self._pending = weakref.ref(end)
        at_end(end)
        return True
