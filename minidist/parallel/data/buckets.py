"""Buckets: many gradients in one flat piece of registered memory, to be reduced as one.

    parameters, last first    head.weight │ norm.weight │ down.weight │ ...
    flat                      ├── view ───┼──── view ───┼──── view ───┤
                              ◀───────────────────── one all-reduce ──▶

A message costs a latency however small it is, and a bandwidth however large: a bucket is large enough for the first not
to count, and small enough for there to be several, so that one can travel while the next is filled. (Li et al. 2020.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm import Communicator
from minidist.parallel.placement import tied_across

MIB = 1 << 20


class Bucket:
    """Parameters whose gradients are reduced in one piece. It is `filling`, `launched`, or `done`.

    Between backwards the gradients lie where autograd put them, and `take` moves them together.
    """

    flat: Tensor | None = None

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.state = "filling"
        self.arrived: set[nn.Parameter] = set()  # in this backward
        self.used: set[nn.Parameter] = set()  # since the gradients were zeroed
        self.handle: Any = None

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Tell whether a gradient came for the parameter since they were zeroed."""
        return parameter in self.used or parameter.grad is not None

    def adopt(self, parameter: nn.Parameter) -> None:
        """Take notice of the parameter's gradient, which stays where autograd put it."""

    def take(self) -> Tensor:
        """Return all gradients, flat, to be reduced; no gradient counts as zero."""
        return take_gradients(self.parameters)

    def wait(self) -> None:
        """Return once the gradients are reduced."""
        self.handle.wait()
        self.state = "done"

    def unreduced(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter if it has come, or was changed, since the bucket was reduced."""
        return parameter.grad

    def forget(self, parameter: nn.Parameter, set_to_none: bool) -> None:
        """Forget the gradient of one parameter, or make it zeros."""
        self.used.discard(parameter)
        if set_to_none or parameter.grad is None:
            parameter.grad = None
        else:
            parameter.grad.zero_()


class FlatBucket(Bucket):
    """A bucket whose gradients live in one flat buffer, each as a view into it."""

    flat: Tensor

    def __init__(self, parameters: list[nn.Parameter], comm: Communicator) -> None:
        super().__init__(parameters)
        self.reduced = -1  # torch's count of changes when the gradients were reduced last
        self.flat = flat_buffer(parameters, comm)
        self.views = dict(zip(parameters, views_into(self.flat, parameters), strict=True))
        self._addresses = {parameter: view.data_ptr() for parameter, view in self.views.items()}

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Tell whether the parameter has a gradient, and not only the zeros that `forget` put in its place."""
        return parameter.grad is not None and (parameter in self.used or parameter.grad is not self.views[parameter])

    def adopt(self, parameter: nn.Parameter) -> None:
        """Have the parameter's gradient live in the bucket, wherever autograd put it; no gradient counts as zero.

        Raises
        ------
        RuntimeError
            If the model was converted meanwhile: torch then moves the gradients out of the bucket, views or not.
        """
        view = self.views[parameter]
        if view.data_ptr() != self._addresses[parameter] or view.dtype != parameter.dtype:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} was moved or converted (now {parameter.dtype}, "
                f"{parameter.device}) after its gradient got a place in a bucket of {self.flat.dtype}, "
                f"{self.flat.device}: call .to(), .half(), ... on the model before wrapping it"
            )
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def take(self) -> Tensor:
        """Return the buffer."""
        return self.flat

    def wait(self) -> None:
        """Return once the gradients are reduced."""
        super().wait()
        self.reduced = self.flat._version

    def unreduced(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter if it has come, or was changed, since the bucket was reduced."""
        unchanged = self.reduced == self.flat._version and parameter.grad is self.views[parameter]
        return None if unchanged else parameter.grad

    def forget(self, parameter: nn.Parameter, set_to_none: bool) -> None:
        """Forget the gradient of one parameter, or make it zeros that lie in the buffer."""
        self.used.discard(parameter)
        view = self.views[parameter]
        parameter.grad = None if set_to_none else view.zero_()


def flat_buffer(parameters: list[nn.Parameter], comm: Communicator) -> Tensor:
    """Return registered memory, all zeros, with room for all of `parameters`. Collective."""
    size, like = sum(parameter.numel() for parameter in parameters), parameters[0]
    registered = comm.allocate(size, like.dtype) if like.device.type != "meta" else like.new_empty(size)
    return registered.to(like.device)  # type: ignore[union-attr]


def views_into(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the part of `flat` that belongs to each parameter, in its shape."""
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


def take_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """Move the gradients into one new flat tensor, freeing each; no gradient counts as zero."""
    flat = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, view in zip(parameters, views_into(flat, parameters), strict=True):
        if parameter.grad is not None:
            view.copy_(parameter.grad)
            parameter.grad = None
    return flat


def kind_of(parameter: nn.Parameter) -> tuple[object, ...]:
    """Return what parameters in one flat tensor have in common.

    One that other stages of a pipeline have, too, is alone in its tensor, which all of them then cut in the same way.
    """
    alone = id(parameter) if tied_across(parameter) else None
    return parameter.dtype, parameter.device, parameter.requires_grad, alone


def partition(parameters: list[nn.Parameter], bucket_bytes: int, first_bytes: int) -> list[list[nn.Parameter]]:
    """Deal parameters, in order, into lists that are closed once they hold enough bytes; one kind to a list."""
    parts: list[list[nn.Parameter]] = []
    held, limit = 0, first_bytes
    for parameter in parameters:
        same = bool(parts) and kind_of(parts[-1][0]) == kind_of(parameter)
        if same and held < limit:
            parts[-1].append(parameter)
        else:
            limit = first_bytes if not parts else bucket_bytes
            parts.append([parameter])
            held = 0
        held += parameter.numel() * parameter.element_size()
    return parts
