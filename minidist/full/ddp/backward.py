"""Hooks of strategies on a model and its backward. They do not keep the strategy alive, and vanish
with it.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from minidist.full.comm import Communicator
from minidist.full.memory.hooks import Hook as Hook


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


def followed(inputs: Any, work: Callable[[], None]) -> Any:
    """Return the nested `inputs`, so hooked that backward calls `work` once it has all their
    gradients.
    """
    tensors = [
        leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not tensors:
        return inputs
    passed = iter(Begin.apply(work, *tensors))  # type: ignore[no-untyped-call]
    return tree_map_only(
        Tensor, lambda tensor: next(passed) if tensor.requires_grad else tensor, inputs
    )


class Begin(torch.autograd.Function):
    """The identity of a unit's inputs, whose backward runs, and calls `work`, when all their
    gradients have come.
    """

    @staticmethod
    def forward(ctx: Any, work: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return `inputs`."""
        ctx.work = work
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return `gradients`."""
        ctx.work()
        return None, *gradients


def recomputing() -> bool:
    """Tell whether a backward has called this forward, to recompute activations."""
    return torch._C._current_graph_task_id() != -1


class BackwardEnd:
    """Calls `work` once at the end of each backward in which `expect` was called."""

    def __init__(self, work: Callable[[], None], comm: Communicator) -> None:
        self.work, self.comm = weakref.WeakMethod(work), comm
        self._pending: weakref.ref[Callable[[], None]] | None = None

    @property
    def expected(self) -> bool:
        """Whether a backward that runs now was asked to call `work`."""
        return self._pending is not None and self._pending() is not None

    def expect(self, kept: object = None) -> bool:
        """Ask the backward that is running to call `work` when it ends, and to keep `kept` alive
        until then. Tell whether it was asked for the first time.

        Raises
        ------
        RuntimeError
            If an earlier backward has raised, and so never came to its end.
        """
        if self.expected:
            return False
        if self._pending is not None and self.comm.size > 1:
            raise RuntimeError(
                f"an earlier backward of rank {self.comm.rank} raised while others wait for its "
                "gradients: end the job, or have all ranks build model and strategy anew"
            )

        work = self.work()
        assert work is not None, "its object asks"

        def end(_: object = kept) -> None:
            self._pending = None
            work()

        # Only autograd keeps this callback, and drops it if backward raises, too: then our
        # reference is dead.
        self._pending = weakref.ref(end)
        at_end(end)
        return True
