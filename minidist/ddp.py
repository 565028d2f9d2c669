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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce, broadcast
from minidist.comm import Communicator

# ---------------------------------------------------------------- the idea


def reduce_each(parameters: Iterable[nn.Parameter], comm: Communicator, op: str = "sum") -> None:
    """Replace every gradient by the sum (or mean) over all ranks, after backward: naively."""
    for parameter in parameters:
        all_reduce(parameter.grad, comm, op)


def reduce_gradients(
    parameters: Sequence[nn.Parameter],
    comm: Communicator,
    op: str = "sum",
    bucket_bytes: int = 4 << 20,
) -> None:
    """Replace every gradient by the sum, bucket by bucket; one that is missing counts as zeros."""
    for bucket in partition(parameters, bucket_bytes):
        flat = take_gradients(bucket)
        view_gradients(bucket, flat)
        all_reduce(flat, comm, op)


def partition(parameters: Sequence[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Divide parameters, last first, into buckets of at most `most` bytes and of one dtype.

    Backward reaches the last layers first. A parameter of over `most` bytes is a bucket by itself.
    """
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        size += parameter.nbytes
        if not buckets or size > most or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = parameter.nbytes
        buckets[-1].append(parameter)
    return buckets


def take_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Move all gradients into one flat tensor; a parameter without one counts as zeros."""
    parts = []
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts.append(gradient.detach().flatten())
        parameter.grad = None
    return torch.cat(parts)


def view_gradients(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Let each gradient be a view into the flat tensor."""
    for parameter, view in zip(parameters, views_into(flat, parameters), strict=True):
        parameter.grad = view


def views_into(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """View parts of a flat tensor in the shapes of parameters, one after the other."""
    parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [part.view(each.shape) for part, each in zip(parts, parameters, strict=True)]


def start_equal(module: nn.Module, comm: Communicator) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        broadcast(tensor.detach(), comm)


# ---------------------------------------------------------------- while backward goes on


class DataParallel(nn.Module):
    """A module whose gradients are reduced in parts, each as soon as backward has completed it.

    A subclass says what `launch` does with a part; with `each_backward`, even under `no_sync`.
    """

    def __init__(
        self, module: nn.Module, parts: Sequence[Sequence[nn.Parameter]], each_backward: bool
    ) -> None:
        super().__init__()
        self.module, self.parts = module, parts
        self.syncs, self.each_backward = True, each_backward
        self.part_of = {each: number for number, part in enumerate(parts) for each in part}
        self.start_over()
        # The hooks hold this object weakly. Otherwise it and the parameters would keep each other
        # alive for ever, since Python's collector does not see the hooks of autograd.
        weakly = weakref.ref(self)

        def hook(parameter: nn.Parameter) -> None:
            if (model := weakly()) is not None:
                model.mark_ready(parameter)

        for parameter in self.part_of:
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """Note that a gradient is complete; launch the parts that are now complete, too."""
        if not self.syncs and not self.each_backward:
            return
        if self.each_backward and self.next == len(self.parts):
            self.start_over()  # all parts have been launched: this is another backward
        missing = self.missing[self.part_of[parameter]]
        if parameter not in missing:
            again = "a second backward would add to gradients that are on their way"
            raise RuntimeError(f"{again}: call finish() first, or use no_sync()")
        missing.remove(parameter)
        # In one order on all ranks, whichever part is complete first: collectives must match.
        while self.next < len(self.parts) and not self.missing[self.next]:
            self.launch(self.next)
            self.next += 1

    def launch(self, number: int) -> None:
        """Begin to reduce the gradients of a part."""
        raise NotImplementedError

    def finish(self) -> None:
        """Launch what backward has not completed. Collective.

        A rank that did not use a parameter contributes zeros, for the others may have used it.
        """
        for number in range(self.next, len(self.parts)):
            self.launch(number)
        self.start_over()

    def start_over(self) -> None:
        """Expect the next gradients."""
        self.missing = [set(part) for part in self.parts]  # whose gradient is not complete
        self.next = 0  # the first part that has not been launched

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients in the body, to be sent later; with `each_backward`, change nothing."""
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True


class Owned(NamedTuple):
    """Elements `start` to `stop` - 1 of a flat parameter, stored in `trained` from `offset` on."""

    parameter: nn.Parameter
    start: int
    stop: int
    trained: nn.Parameter
    offset: int


class DDP(DataParallel):
    """A module whose gradients are all-reduced in buckets; to run, `minidist.full.DDP`.

    model = DDP(model, comm, op="sum")  all ranks begin with rank 0's parameters
    loss_of(model(tokens)).backward()
    model.finish()                      wait for the last messages
    optimizer.step()                    the same on every rank
    """

    def __init__(
        self, module: nn.Module, comm: Communicator, op: str, bucket_bytes: int = 4 << 20
    ) -> None:
        start_equal(module, comm)
        trained = [each for each in module.parameters() if each.requires_grad]
        super().__init__(module, partition(trained, bucket_bytes), each_backward=False)
        self.trained, self.op = trained, op
        self.stream = comm.stream()

    def launch(self, number: int) -> None:
        """Have the stream sum a bucket's gradients while backward goes on."""
        flat = take_gradients(self.parts[number])
        view_gradients(self.parts[number], flat)
        self.stream.launch(all_reduce, flat, self.stream.comm, self.op)

    def finish(self) -> None:
        """Wait until every gradient is the sum over all ranks. Collective."""
        super().finish()
        self.stream.wait()

    def owned(self) -> Iterator[Owned]:
        """Yield what this rank updates: all of every parameter."""
        for parameter in self.trained:
            yield Owned(parameter, 0, parameter.numel(), parameter, 0)

    def publish(self) -> None:
        """Do nothing: every rank has made the same update."""
