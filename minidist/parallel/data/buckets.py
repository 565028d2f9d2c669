"""Buckets: many gradients in one flat tensor of registered memory, which one collective reduces.

    parameters, last first    head.weight │ norm.weight │ down.weight │ ...
    flat                      ├── view ───┼──── view ───┼──── view ───┤
                              ◀───────────────────── one all-reduce ──▶

Each message costs a latency, however small it is, and then a time for each byte. A bucket is so
large that the latency hardly counts, and so small that there are several: one travels while the
next is filled. (Li et al. 2020, section 3.2.)
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm import Communicator
from minidist.parallel.placement import expert_groups_of, tied_across

MIB = 1 << 20


class Bucket:
    """Parameters whose gradients are reduced together.

    The gradients stay where autograd has put them until `take` moves them into one flat tensor.
    Ranks that hold the same parameters reduce it on `link`.
    """

    flat: Tensor | None = None

    def __init__(self, parameters: list[nn.Parameter], link: Communicator) -> None:
        self.parameters, self.link = parameters, link
        self.kind = parameters[0].dtype, parameters[0].device  # of all its parameters
        self.arrived: set[nn.Parameter] = set()  # in this backward
        self.taken: set[nn.Parameter] = set()  # whose gradients were taken since they were zeroed
        self.handle: Any = None

    def moved(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter was moved or converted: torch drops our hooks on it then."""
        return (parameter.dtype, parameter.device) != self.kind

    def check_place(self, parameter: nn.Parameter) -> None:
        """Raise RuntimeError if a parameter was moved or converted."""
        if self.moved(parameter):
            was, now = "{}, {}".format(*self.kind), f"{parameter.dtype}, {parameter.device}"
            fault = (
                f"a parameter of shape {list(parameter.shape)} was moved or converted from {was} "
                f"to {now}"
            )
            raise RuntimeError(f"{fault}: call .to(), .half(), ... on the model before wrapping it")

    def adopt(self, parameter: nn.Parameter) -> None:
        """Take over the parameter's gradient. Here it stays where autograd has put it."""

    def take(self) -> Tensor:
        """Return all gradients in one flat tensor, to be reduced. A missing gradient counts as
        zero.
        """
        self.taken.update(parameter for parameter in self.parameters if parameter._grad is not None)
        return take_gradients(self.parameters)

    def wait(self) -> None:
        """Wait until the gradients are reduced."""
        self.handle.wait()

    def unreduced(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter if it has come, or was changed, since the bucket was
        reduced.
        """
        return parameter._grad


class FlatBucket(Bucket):
    """A bucket whose gradients are views into one flat buffer."""

    flat: Tensor

    def __init__(
        self, parameters: list[nn.Parameter], comm: Communicator, link: Communicator
    ) -> None:
        super().__init__(parameters, link)
        self.reduced = -1  # torch's count of changes when the gradients were reduced last
        self.flat = flat_buffer(parameters, comm)
        self.views = dict(zip(parameters, views_into(self.flat, parameters), strict=True))

    def moved(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter was moved or converted: torch takes its gradient out then."""
        outside = (
            self.views[parameter].untyped_storage().data_ptr()
            != self.flat.untyped_storage().data_ptr()
        )
        return outside or super().moved(parameter)

    def adopt(self, parameter: nn.Parameter) -> None:
        """Move the parameter's gradient into the bucket, wherever autograd has put it. A missing
        one counts as zero.

        Raises
        ------
        RuntimeError
            If the model was moved or converted meanwhile.
        """
        self.check_place(parameter)
        view = self.views[parameter]
        if parameter._grad is None:
            view.zero_()
        elif parameter._grad is not view:
            view.copy_(parameter._grad)
        parameter._grad = view

    def take(self) -> Tensor:
        """Return the buffer."""
        return self.flat

    def wait(self) -> None:
        """Wait until the gradients are reduced."""
        super().wait()
        self.reduced = self.flat._version

    def unreduced(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter if it has come, or was changed, since the bucket was
        reduced.
        """
        unchanged = self.reduced == self.flat._version and parameter._grad is self.views[parameter]
        return None if unchanged else parameter._grad


def flat_buffer(parameters: list[nn.Parameter], comm: Communicator) -> Tensor:
    """Return a flat tensor of zeros in registered memory that has room for all `parameters`.
    Collective.
    """
    size, like = sum(parameter.numel() for parameter in parameters), parameters[0]
    registered = (
        comm.allocate(size, like.dtype) if like.device.type != "meta" else like.new_empty(size)
    )
    return registered.to(like.device)  # type: ignore[union-attr]


def views_into(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the part of `flat` that belongs to each parameter, in its shape."""
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


def take_gradients(parameters: list[nn.Parameter], dtype: torch.dtype | None = None) -> Tensor:
    """Move the gradients into one new flat tensor of a dtype, and free them. A missing gradient
    counts as zero.
    """
    gradients = [
        p.new_zeros(p.numel()) if p._grad is None else p._grad.flatten() for p in parameters
    ]
    flat = parameters[0].new_empty(sum(map(len, gradients)), dtype=dtype)
    for parameter in parameters:
        parameter._grad = None
    return torch.cat(gradients, out=flat)


def make_room(whole: Tensor) -> Tensor:
    """Give memory back to a tensor whose storage was resized to 0 bytes; return a flat tensor
    through which to write.

    On a CPU that is another tensor on the same memory: torch no longer resizes a storage that numpy
    has seen.
    """
    if not whole.untyped_storage().nbytes():
        whole.untyped_storage().resize_(whole.nbytes)
    if whole.device.type != "cpu" or not whole.nbytes:
        return whole
    return torch.frombuffer(
        (ctypes.c_byte * whole.nbytes).from_address(whole.data_ptr()), dtype=whole.dtype
    )


def kind_of(parameter: nn.Parameter) -> tuple[object, ...]:
    """Return what all parameters in one flat tensor must have in common.

    A parameter that another stage of a pipeline has, too, gets a flat tensor of its own: both
    stages then cut it alike. Experts that ranks have shared out have other copies than all else.
    """
    alone = id(parameter) if tied_across(parameter) else None
    return (
        parameter.dtype,
        parameter.device,
        parameter.requires_grad,
        alone,
        expert_groups_of(parameter),
    )


def partition(
    parameters: list[nn.Parameter], bucket_bytes: int, first_bytes: int
) -> list[list[nn.Parameter]]:
    """Deal parameters out, in order, to lists. A list has one kind, and is closed once it holds
    enough bytes.
    """
    parts: list[list[nn.Parameter]] = []
    held, limit = 0, first_bytes
    for parameter in parameters:
        same = bool(parts) and kind_of(parts[-1][0]) == kind_of(parameter)
        if not (same and held < limit):
            limit, held = bucket_bytes if parts else first_bytes, 0
            parts.append([])
        parts[-1].append(parameter)
        held += parameter.nbytes
    return parts
