"""What is asked of a rank's replica of the model: one protocol for all strategies over the data
axis.

    who asks                what
    trainer                 optimizer, stepped, zero_grad, no_sync, synchronize, unwrap, stream
    pipeline                called, whole_parameters, whole_gradients, slice_of, no_sync, synchronize, alone
    checkpoints, clipping   kept: whole parameters, or the slices that this rank updates
    summaries               volume

The answers here are those of a rank that is alone on the data axis. Each strategy overrides those
that differ.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.full.comm import Communicator
from minidist.full.comm.stream import Stream
from minidist.full.optimizer.groups import known_groups

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def no_loss(device: torch.device) -> Tensor:
    """Return the 0 to which the losses of microbatches are added.

    In float64, so that the sum of the same microbatches has the same digits on one rank as on
    several.
    """
    return torch.zeros((), dtype=torch.float64, device=device)


class Remembered(NamedTuple):
    """What a strategy keeps of a parameter's gradients from one step to the next.

    Attributes
    ----------
    word : str
        Its name in a checkpoint.
    parameter : nn.Parameter
    tensor : Tensor
        To be copied into.
    alike : bool
        It is the same on all ranks of the data axis, and has a shape of its own. Otherwise each
        rank has its own, with the elements of the parameter; what counts is the sum over ranks.
    """

    word: str
    parameter: nn.Parameter
    tensor: Tensor
    alike: bool


@runtime_checkable
class Replica(Protocol):
    """This rank's copy of the model, and how it is kept equal to the other copies on the data axis.

    Attributes
    ----------
    module : nn.Module
        The model as this rank has it, without a wrapper.
    parameters_to_reduce : list[nn.Parameter]
        The trained parameters, in the model's order.
    stream : Stream or None
        The stream on which the strategy communicates beside computing, if it does.
    alone : bool
        Whether no other rank has a copy.
    whole_parameters : bool
        Whether every rank holds all parameters between two forwards. If not, only `called` can be
        called, not its parts.
    whole_gradients : bool
        Whether every rank holds all gradients between two backwards. If not, the gradients of each
        microbatch are reduced, because `no_sync` would hold whole ones.
    """

    module: nn.Module
    parameters_to_reduce: list[nn.Parameter]
    stream: Stream[Communicator] | None = None
    alone: bool = True
    whole_parameters: bool = True
    whole_gradients: bool = True

    @property
    def called(self) -> nn.Module:
        """The module to call in place of the model."""
        return self.module

    def slice_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what this rank's optimizer updates of a trained parameter: all of it, or a flat
        slice.
        """
        return parameter

    @property
    def trained(self) -> list[nn.Parameter]:
        """What this rank's optimizer updates, in the model's order: slices under ZeRO, else
        parameters.
        """
        return [self.slice_of(parameter) for parameter in self.parameters_to_reduce]

    @property
    def kept(self) -> list[nn.Parameter]:
        """What a checkpoint keeps of this rank: what is trained, and what is frozen."""
        return [self.slice_of(p) if p.requires_grad else p for p in self.module.parameters()]

    def optimizer(
        self,
        kind: Callable[..., Optimizer],
        groups: ParamsT | None = None,
        elementwise: bool = False,
        **options: Any,
    ) -> Optimizer:
        """Return an optimizer of this `kind` over what this rank updates.

        Parameters
        ----------
        kind
            A class of optimizers, or what returns one.
        groups : optional
            The first argument of torch's optimizers, over the model's own parameters: parameters,
            pairs of name and parameter, or groups of them. By default all trained parameters.
        elementwise : bool
            Say that a `kind` treats each element separately, if it is not one of torch's or of this
            package.
        options
            Arguments of `kind`.

        Raises
        ------
        ValueError
            If something in `groups` is no parameter of the model.
        """
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        given = [{"params": self.trained}] if groups is None else groups
        return kind(known_groups(given, names, "this rank's part of the model"), **options)

    def stepped(self, updated: Collection[nn.Parameter] | None = None) -> None:
        """Let parameters follow `trained`, after something other than the optimizer has changed it.

        Collective.

        With `updated`, only these parameters have changed.
        """
        return

    def follow(self, *_: object) -> None:
        """Let parameters follow `trained` where it was changed, but by no step and without
        `stepped`. A forward begins with this; collective.
        """
        return

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.module.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Only add up gradients locally in this context.

        It is for all microbatches of a step but the last.
        """
        return nullcontext()

    def synchronize(self) -> None:
        """Make the gradients equal on all ranks; call it once after the last backward of a step."""
        return

    def volume(self, microbatches: int) -> tuple[str, float]:
        """Return what a rank sends in a step with this number of microbatches: a formula in words,
        and its bytes.
        """
        return "0", 0.0

    def remembered(self) -> Iterable[Remembered]:
        """Return what has to be in a checkpoint for a run to go on as if it had not stopped."""
        return ()

    def between_nodes(self, microbatches: int = 1) -> tuple[Communicator, float] | None:
        """Return, if a strategy keeps nodes apart, the communicator to others, and the bytes of a
        step on it.
        """
        return None

    def unwrap(self) -> nn.Module:
        """End the strategy; return the model, whole on every rank."""
        return self.module


class Alone(Replica):
    """The model of a rank that has the data axis to itself."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self.parameters_to_reduce = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
