"""Data parallelism: each rank has a full model and a part of the batch; gradients are summed.

    parameters, last first    head.weight │ norm.weight │ down.weight │ up.weight ...
                              ├────── bucket 0 ─────────┼─────── bucket 1 ────── ...
    bucket 0, then 1, ...     its gradients in one flat tensor ─▶ all-reduce ─▶ each gradient is a view into it

    backward    layer 3 │ layer 2 │ layer 1 │ layer 0         `DDP` sends a bucket as soon as backward
    messages              bucket 0  bucket 1  bucket 2        has filled it, while earlier layers compute

Why buckets? One message for each parameter would cost a latency for each; one message for all would
begin when backward has ended. With n bytes of gradients, each rank sends 2 (P - 1)/P n.

With `op="sum"` gradients are summed: if each rank divides its loss by the global number of tokens,
the sum is exactly the serial gradient. `op="mean"` is torch's convention, for loops that divide by
the local number of tokens. The wrong one makes all gradients P times too large or too small, and
nothing complains. (Li et al. 2020, sections 2.2 and 3.2.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce, broadcast
from minidist.comm import Communicator, Stream

# ---------------------------------------------------------------- the idea


def reduce_gradients(
    parameters: Sequence[nn.Parameter],
    comm: Communicator,
    op: str = "sum",
    bucket_bytes: int = 4 << 20,
) -> None:
    """Replace every gradient by the sum (or mean) over all ranks, after backward. Collective."""
    for bucket in partition(parameters, bucket_bytes):
        flat = take_gradients(bucket)
        all_reduce(flat, comm, op)
        show_gradients(bucket, flat)


def partition(parameters: Sequence[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Divide parameters, last first, into buckets of at most `most` bytes and of one dtype.

    Backward reaches the last layers first. A parameter of over `most` bytes is a bucket by itself.
    """
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        fits = size + parameter.nbytes <= most
        if not buckets or not fits or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets


def take_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Move all gradients into one flat tensor; a parameter without one counts as zeros."""
    parts = []
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts.append(gradient.detach().flatten())
        parameter.grad = None
    return torch.cat(parts)


def show_gradients(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Let each gradient be a view into the flat tensor."""
    for parameter, view in zip(parameters, views_into(flat, parameters), strict=True):
        parameter.grad = view


def views_into(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """View parts of a flat tensor in the shapes of parameters, one after the other."""
    parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [part.view(each.shape) for part, each in zip(parts, parameters, strict=True)]


@torch.no_grad()
def start_equal(module: nn.Module, comm: Communicator) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        whole = tensor.detach().contiguous()
        broadcast(whole, comm)
        tensor.copy_(whole)


# ---------------------------------------------------------------- the class, which overlaps


class Owned(NamedTuple):
    """Where a rank keeps what it updates: elements `start` to `stop` of a parameter, flattened,
    are `trained[offset:]`.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    trained: nn.Parameter
    offset: int


class DDP(nn.Module):
    """A module whose gradients are summed over ranks while backward goes on.

    model = DDP(model, comm, op="sum")
    loss_of(model(tokens)).backward()
    model.finish()                      wait for the last messages
    optimizer.step()                    the same on every rank

    Parameters
    ----------
    module : nn.Module
        Rank 0's parameters and buffers are copied to all ranks.
    comm : Communicator
        The ranks that have copies.
    op : {"sum", "mean"}
        See above.
    bucket_bytes : int
        The most bytes of a bucket.
    """

    def __init__(
        self, module: nn.Module, comm: Communicator, op: str, bucket_bytes: int = 4 << 20
    ) -> None:
        super().__init__()
        self.module, self.op, self.syncs = module, op, True
        start_equal(module, comm)
        self.trained = [each for each in module.parameters() if each.requires_grad]
        self.buckets = [Bucket(part) for part in partition(self.trained, bucket_bytes)]
        self.bucket_of = {each: bucket for bucket in self.buckets for each in bucket.parameters}
        self.next = 0  # the first bucket that has not been launched
        self.stream = Stream(comm)
        self.hooks = when_gradient_arrives(self.trained, self.mark_ready)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **options)

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """Note that a gradient is complete; launch the buckets that are now full."""
        if not self.syncs:
            return
        self.bucket_of[parameter].missing.discard(parameter)
        # In one order on all ranks, whichever bucket is full first: collectives must match.
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self.launch(self.buckets[self.next])

    def launch(self, bucket: Bucket) -> None:
        """Begin to sum a bucket's gradients."""
        bucket.flat = take_gradients(bucket.parameters)
        self.stream.launch(all_reduce, bucket.flat, self.stream.comm, self.op)
        self.next += 1

    def finish(self) -> None:
        """Wait until every gradient is the sum over all ranks. Collective.

        Buckets that backward has not filled are sent now: a rank that did not use a parameter
        contributes zeros, for the others may have used it.
        """
        while self.next < len(self.buckets):
            self.launch(self.buckets[self.next])
        self.stream.wait()
        for bucket in self.buckets:
            show_gradients(bucket.parameters, bucket.flat)
            bucket.missing = set(bucket.parameters)
        self.next = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients here in the body; the next backward or `finish` sends their sum."""
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True

    def owned(self) -> Iterator[Owned]:
        """Yield what this rank updates: all of every parameter."""
        for parameter in self.trained:
            yield Owned(parameter, 0, parameter.numel(), parameter, 0)

    def publish(self) -> None:
        """Do nothing: every rank has made the same update."""


class Bucket:
    """Gradients that travel together: filling while any is `missing`, then launched."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.missing = parameters, set(parameters)
        self.flat = torch.empty(0)


def when_gradient_arrives(
    parameters: Sequence[nn.Parameter], call: Callable[[nn.Parameter], None]
) -> list[Any]:
    """Have `call(parameter)`, a method, called whenever backward has added to a gradient.

    The hooks hold its object weakly. Otherwise parameter and object would keep each other alive
    for ever, since Python's collector does not see the hooks of autograd.
    """
    method = weakref.WeakMethod(call)

    def hook(parameter: Any) -> None:
        if (found := method()) is not None:
            found(parameter)

    register = nn.Parameter.register_post_accumulate_grad_hook
    return [register(parameter, hook) for parameter in parameters]  # type: ignore[no-untyped-call]
