"""Lesson 04, solved with the package. Read `minidist/ddp.py`, then `data_parallel.py` and
`sampler.py` of `minidist/full/ddp`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from minidist import Communicator
from minidist.full.collectives import all_reduce, broadcast
from minidist.full.ddp.buckets import Bucket, FlatBucket, partition
from minidist.full.ddp.data_parallel import DDP
from minidist.full.ddp.sampler import share


def local_loss(model: nn.Module, inputs: Tensor, targets: Tensor, comm: Communicator) -> Tensor:
    """Return the sum over this rank's rows, divided by the number of rows of all ranks."""
    mine = share(len(inputs), comm.size, comm.rank)
    return (model(inputs[mine]) - targets[mine]).square().sum() / len(inputs)


def start_equal(model: nn.Module, comm: Communicator) -> None:
    """Give every rank the parameters of rank 0."""
    for parameter in model.parameters():
        broadcast(parameter.detach(), comm, algorithm="tree")


def sum_gradients(model: nn.Module, comm: Communicator) -> None:
    """Reduce every gradient by itself: `reduce_gradients` of the book without its buckets."""
    for parameter in model.parameters():
        all_reduce(parameter.grad, comm, algorithm="ring")


def assign_buckets(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Deal parameters into buckets, last parameter first."""
    return partition(parameters[::-1], limit, limit)


class BucketedGradients(DDP):
    """The package's DDP, with rings on the given stream. It waits at the end of backward by
    itself.
    """

    def __init__(self, model: nn.Module, comm: Communicator, stream: Any, limit: int) -> None:
        super().__init__(model, comm, op="sum", bucket_bytes=limit, first_bucket_bytes=limit)
        self.stream = stream

    @property
    def synchronising(self) -> bool:
        """True while a backward reduces its gradients."""
        return self.expected.synchronising

    @synchronising.setter
    def synchronising(self, reduced: bool) -> None:
        self.expected.synchronising = reduced

    def launch(self, bucket: Bucket) -> Any:
        """Begin a ring all-reduce."""
        assert isinstance(bucket, FlatBucket)
        return self.stream.launch(all_reduce, bucket.flat, self.stream.comm, self.op, "ring")

    def finish(self) -> None:
        """Reduce the buckets that no backward has reduced."""
        self.synchronize()


def accumulate(
    model: nn.Module,
    gradients: BucketedGradients,
    inputs: Tensor,
    targets: Tensor,
    microbatches: int,
    comm: Communicator,
) -> None:
    """Run all microbatches; only the last one synchronises."""
    mine = share(len(inputs), comm.size, comm.rank)
    parts = zip(
        inputs[mine].tensor_split(microbatches),
        targets[mine].tensor_split(microbatches),
        strict=True,
    )
    try:
        for number, (some, wanted) in enumerate(parts, start=1):
            gradients.synchronising = number == microbatches
            ((model(some) - wanted).square().sum() / len(inputs)).backward()
    finally:
        gradients.synchronising = True
    gradients.finish()
