"""The strategies that reduce after backward: the book's `reduce_gradients`, applied to a model.

variant             a bucket has      messages for M parameters, B buckets
ParameterServer     one parameter     P - 1 in and out of one rank, M times
NaiveDataParallel   one parameter     M all-reduces
PlainDataParallel   many              B all-reduces
"""

from torch import nn

from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.ddp.buckets import BUCKET_BYTES, partition
from minidist.full.ddp.flatten import take_gradients, views_into
from minidist.full.ddp.strategy import DataParallel, refuse_sparse
from minidist.full.placement import copies_of


def reduce_gradients(
    buckets: list[list[nn.Parameter]], comm: Communicator, op: str, algorithm: str = "auto"
) -> None:
    """Replace every gradient by the sum (or mean) of all ranks' gradients. Collective.

    Cost: one all-reduce for each bucket. Experts that ranks have shared out have fewer copies than
    all else, and only these are summed.
    """
    for bucket in buckets:
        flat = take_gradients(bucket)
        all_reduce(flat, copies_of(bucket[0], comm), op, algorithm)
        for parameter, total in zip(bucket, views_into(flat, bucket), strict=True):
            parameter.grad = total


class NaiveDataParallel(DataParallel):
    """One all-reduce per parameter, after backward: small parameters cost a latency each."""

    algorithm = "auto"

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str | None = None,
        unused: bool = False,
        *,
        equal: bool = False,
    ) -> None:
        super().__init__(model, comm, op, unused, equal=equal)
        self.buckets = [[parameter] for parameter in self.parameters_to_reduce]

    def synchronize(self) -> None:
        """Reduce every gradient; call it once after the last backward of a step."""
        for parameter, name in self.names.items():
            refuse_sparse(parameter, name, type(self).__name__)
        used = {parameter for parameter in self.parameters_to_reduce if parameter.grad is not None}
        reduce_gradients(self.buckets, self.comm, self.op, self.algorithm)
        self.reduced(used)


class ParameterServer(NaiveDataParallel):
    """Rank 0 collects every gradient and answers with the sum.

    A server that also took the optimizer's step would answer with the new parameter. That sends as
    many bytes, but the other ranks would have no optimizer of their own.
    """

    algorithm = "central"


class PlainDataParallel(NaiveDataParallel):
    """One all-reduce per bucket, after backward.

    A bucket is closed once it holds `bucket_bytes`.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str | None = None,
        unused: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(model, comm, op, unused)
        self.buckets = partition(self.parameters_to_reduce[::-1], bucket_bytes, bucket_bytes)
