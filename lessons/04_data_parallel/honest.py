"""Lesson 04, solved by hand from the handout: data parallelism, from a share of the batch to
overlapping buckets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minidist import Communicator
from minidist.full.collectives import all_reduce, broadcast


def local_loss(model: nn.Module, inputs: Tensor, targets: Tensor, comm: Communicator) -> Tensor:
    """Task 1: return this rank's part of the loss of a batch; the parts of all ranks add up to the
    loss.
    """
    rows = torch.tensor_split(inputs, comm.size)[comm.rank]
    wanted = torch.tensor_split(targets, comm.size)[comm.rank]
    return (model(rows) - wanted).square().sum() / len(inputs)


def start_equal(model: nn.Module, comm: Communicator) -> None:
    """Task 2, first half: give every rank the parameters of rank 0."""
    for parameter in model.parameters():
        broadcast(parameter.detach(), comm, algorithm="tree")


def sum_gradients(model: nn.Module, comm: Communicator) -> None:
    """Task 2, second half: after backward, replace every gradient by the sum of all ranks'
    gradients.
    """
    for parameter in model.parameters():
        all_reduce(parameter.grad, comm, algorithm="ring")


def assign_buckets(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Task 3, first half: deal parameters into buckets, last parameter first."""
    buckets = []
    filling: list[nn.Parameter] = []
    for parameter in reversed(parameters):
        filling.append(parameter)
        if sum(member.nbytes for member in filling) >= limit:
            buckets.append(filling)
            filling = []
    if filling:
        buckets.append(filling)
    return buckets


class BucketedGradients:
    """Task 3, second half: sums gradients bucket by bucket, while backward still runs."""

    def __init__(self, model: nn.Module, comm: Communicator, stream: Any, limit: int) -> None:
        self.synchronising = True
        self.stream = stream
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.number = {
            parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket
        }
        self.start_over()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def start_over(self) -> None:
        """Be ready for a backward: every gradient is missing, no bucket is launched."""
        self.missing = [len(bucket) for bucket in self.buckets]
        self.launched: list[tuple[Tensor, Any]] = []

    def arrived(self, parameter: nn.Parameter) -> None:
        """Count a gradient, and launch, in order, the buckets that are complete now."""
        if not self.synchronising:
            return
        self.missing[self.number[parameter]] -= 1
        while len(self.launched) < len(self.buckets) and self.missing[len(self.launched)] == 0:
            self.launch(self.buckets[len(self.launched)])

    def launch(self, bucket: list[nn.Parameter]) -> None:
        """Send a bucket off, as one flat tensor."""
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        handle = self.stream.launch(lambda: all_reduce(flat, self.stream.comm, algorithm="ring"))
        self.launched.append((flat, handle))

    def finish(self) -> None:
        """Wait for all buckets and copy each sum back into `parameter.grad`; then be ready for the
        next backward.
        """
        for bucket, (flat, handle) in zip(self.buckets, self.launched, strict=True):
            handle.wait()
            sums = flat.split([parameter.numel() for parameter in bucket])
            for parameter, total in zip(bucket, sums, strict=True):
                parameter.grad.copy_(total.view_as(parameter))
        self.start_over()


def accumulate(
    model: nn.Module,
    gradients: BucketedGradients,
    inputs: Tensor,
    targets: Tensor,
    microbatches: int,
    comm: Communicator,
) -> None:
    """Task 4: find the gradient of the loss of a batch in several backwards, communicating in the
    last one only.
    """
    rows = torch.tensor_split(inputs, comm.size)[comm.rank].tensor_split(microbatches)
    wanted = torch.tensor_split(targets, comm.size)[comm.rank].tensor_split(microbatches)
    try:
        for index in range(microbatches):
            gradients.synchronising = index == microbatches - 1
            ((model(rows[index]) - wanted[index]).square().sum() / len(inputs)).backward()
    finally:
        gradients.synchronising = True
    gradients.finish()
