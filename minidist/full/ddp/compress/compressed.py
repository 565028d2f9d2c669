"""DDP whose buckets travel compressed.

    topk:0.01      the largest hundredth of the elements, the others later          `top_k.py`

A bucket is compressed on DDP's stream, as its gradients come: beside backward.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from minidist.full.comm import Communicator
from minidist.full.comm.stream import Handle
from minidist.full.ddp.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket
from minidist.full.ddp.compress.options import read_share
from minidist.full.ddp.compress.top_k import TopK
from minidist.full.ddp.data_parallel import DDP
from minidist.full.placement import by_copies, copies_of
from minidist.full.replica import Remembered


class Compressed(Protocol):
    """What a bucket travels as."""

    def reduce(self, gradients: list[Tensor], comm: Communicator) -> None:
        """Replace this rank's gradients by the same on every rank: about their sum. Collective."""

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank sends for it."""

    def remembered(self) -> Iterable[Remembered]:
        """Return what it keeps from step to step."""


Compressor = Callable[[list[nn.Parameter], Communicator], Compressed]


def compressor_of(words: str) -> Compressor:
    """Return what compresses a bucket's gradients, as a user asks for it."""
    share, momentum = read_share(words)
    return lambda parameters, comm: TopK(parameters, share, momentum)


class GradientBucket(Bucket):
    """A bucket whose gradients stay where autograd has put them, also while they are reduced."""

    def gather(self) -> list[Tensor]:
        """Return the gradients, contiguous, in the order of the parameters; what is missing is
        zero.
        """
        self.taken.update(each for each in self.parameters if each._grad is not None)
        gradients = []
        for parameter in self.parameters:
            gradient = parameter._grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            gradient = gradient.contiguous().as_subclass(Tensor)  # to be compressed alone
            parameter._grad = gradient
            gradients.append(gradient)
        return gradients


class CompressedDDP(DDP):
    """DDP in which each bucket is compressed, and what is not sent kept for the next step.

    Parameters
    ----------
    model, comm, op, unused, bucket_bytes, first_bucket_bytes, equal
        As for `DDP`.
    compress : callable
        `compress(parameters, comm)` returns what the gradients of these travel as; see
        `compressor_of`.

    With `no_sync` for all microbatches but the last, a step compresses once. The update is not that
    of a serial run, and depends on how many ranks there are. What is kept has the scale that
    gradients had, so the scale of a loss must not change.
    """

    # what is sent is smaller than the gradients, so these stay where autograd has put them
    kind = GradientBucket

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str | None = None,
        unused: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        *,
        compress: Compressor,
        equal: bool = False,
    ) -> None:
        super().__init__(model, comm, op, unused, bucket_bytes, first_bucket_bytes, equal=equal)
        self.compressed: dict[Bucket, list[tuple[list[nn.Parameter], Compressed]]] = {}
        for bucket in self.reducer.buckets:
            copies = copies_of(bucket.parameters[0], comm)
            self.compressed[bucket] = [
                (each, compress(each, copies)) for each in by_copies(bucket.parameters)
            ]

    def launch(self, bucket: Bucket) -> Handle:
        """Begin to reduce a bucket; return what to wait for."""
        return self.stream.launch(self._reduce, bucket)

    def _reduce(self, bucket: Bucket) -> None:
        assert isinstance(bucket, GradientBucket)
        gradients = dict(zip(bucket.parameters, bucket.gather(), strict=True))
        for parameters, compressed in self.compressed[bucket]:
            compressed.reduce([gradients[parameter] for parameter in parameters], bucket.link)
        if self.op == "mean":
            for gradient in gradients.values():
                gradient /= bucket.link.size

    def remembered(self) -> Iterable[Remembered]:
        """Return what each bucket keeps from step to step."""
        parts = chain.from_iterable(self.compressed.values())
        return chain.from_iterable(compressed.remembered() for _, compressed in parts)

    def held(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors by category, for `Account`: what is kept back are gradients."""
        kept = [each for each in self.remembered() if not each.alike]
        factors = [each for each in self.remembered() if each.alike]
        return {
            "gradients": [each.tensor for each in kept],
            "communication": [each.tensor for each in factors],
        }

    def volume(self, microbatches: int) -> tuple[str, float]:
        """Return what a rank sends in a step of any number of microbatches."""
        sent = 0.0
        for bucket, parts in self.compressed.items():
            sent += sum(compressed.sent(bucket.link.size) for _, compressed in parts)
        return "of compressed gradients", sent
