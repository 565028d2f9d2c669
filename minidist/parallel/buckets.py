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


class Bucket:
    """A flat buffer of gradients, reduced in one piece. It is `filling`, `launched`, or `done`."""

    def __init__(self, parameters: list[nn.Parameter], comm: Communicator) -> None:
        self.parameters = parameters
        size, like = sum(parameter.numel() for parameter in parameters), parameters[0]
        registered = comm.allocate(size, like.dtype) if like.device.type != "meta" else like.new_empty(size)
        self.flat: Tensor = registered.to(like.device)  # type: ignore[union-attr]
        self.views = dict(zip(parameters, self._views(), strict=True))
        self._addresses = {parameter: view.data_ptr() for parameter, view in self.views.items()}
        self.state = "filling"
        self.arrived: set[nn.Parameter] = set()  # in this backward
        self.used: set[nn.Parameter] = set()  # since the gradients were zeroed
        self.handle: Any = None

    def _views(self) -> list[Tensor]:
        pieces = torch.split(self.flat, [parameter.numel() for parameter in self.parameters])
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Tell whether the parameter has a gradient, and not only the zeros that `DDP.zero_grad` put in its place."""
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


def partition(parameters: list[nn.Parameter], bucket_bytes: int, first_bytes: int) -> list[list[nn.Parameter]]:
    """Deal parameters, in order, into lists that are closed once they hold enough bytes; one dtype to a list."""
    parts: list[list[nn.Parameter]] = []
    held, limit = 0, first_bytes
    for parameter in parameters:
        same = bool(parts) and parts[-1][0].dtype == parameter.dtype and parts[-1][0].device == parameter.device
        if same and held < limit:
            parts[-1].append(parameter)
        else:
            limit = first_bytes if not parts else bucket_bytes
            parts.append([parameter])
            held = 0
        held += parameter.numel() * parameter.element_size()
    return parts
