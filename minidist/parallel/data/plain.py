"""Data parallelism on a page: each rank has a full model and a part of the batch; after backward,
gradients are summed.

    parameters, last first    head.weight │ norm.weight │ down.weight │ up.weight ...
                              ├────── bucket 0 ─────────┼─────── bucket 1 ────── ...
    bucket 0, then 1, ...     move its gradients into one flat tensor ─▶ all-reduce ─▶ each gradient is a view into it

    variant             a bucket has      messages for M parameters, B buckets
    ParameterServer     one parameter     P - 1 in and out of one rank, M times
    NaiveDataParallel   one parameter     M all-reduces
    PlainDataParallel   many              B all-reduces

With n bytes of gradients, each rank sends 2 (P - 1)/P n bytes. With a server, each rank sends n
bytes, and the server sends (P - 1) n.

With `op="sum"` gradients are summed: if each rank divides its loss by the global number of tokens,
the sum is exactly the serial gradient. `op="mean"` is torch's convention: it suits loops that
divide by the local number of tokens. The classes have no default: the wrong one would make all
gradients P times too large or too small, without a word. (Li et al. 2020, sections 2.2 and 3.2.)
"""

from torch import nn

from minidist.collectives import all_reduce
from minidist.comm import Communicator
from minidist.parallel.data.buckets import MIB, partition, take_gradients, views_into
from minidist.parallel.data.strategy import DataParallel
from minidist.parallel.placement import copies_of


def reduce_gradients(
    buckets: list[list[nn.Parameter]], comm: Communicator, op: str = "sum", algorithm: str = "auto"
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


class PlainDataParallel(DataParallel):
    """One all-reduce per bucket, after backward. A bucket is closed once it holds
    `bucket_bytes`.
    """

    algorithm = "auto"

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str | None = None,
        unused: bool = False,
        bucket_bytes: int = 25 * MIB,
    ) -> None:
        super().__init__(model, comm, op, unused)
        self.buckets = partition(self.parameters_to_reduce[::-1], bucket_bytes, bucket_bytes)

    def synchronize(self) -> None:
        """Reduce every gradient; call it once after the last backward of a step."""
        used = {parameter for parameter in self.parameters_to_reduce if parameter.grad is not None}
        reduce_gradients(self.buckets, self.comm, self.op, self.algorithm)
        self._drop_unused(used)


class NaiveDataParallel(PlainDataParallel):
    """One all-reduce per parameter, after backward: small parameters cost a latency each."""

    def __init__(
        self, model: nn.Module, comm: Communicator, op: str | None = None, unused: bool = False
    ) -> None:
        super().__init__(model, comm, op, unused)
        self.buckets = [[parameter] for parameter in self.parameters_to_reduce]


class ParameterServer(NaiveDataParallel):
    """Rank 0 collects every gradient and answers with the sum.

    A server that also took the optimizer's step would answer with the new parameter. That sends as
    many bytes, but the other ranks would have no optimizer of their own.
    """

    algorithm = "central"
