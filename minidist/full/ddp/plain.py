"""Data parallelism on a page: each rank has a full model and a part of the batch; after backward,
gradients are summed.

    parameters, last first    head.weight │ norm.weight │ down.weight │ up.weight ...
                              ├────── bucket 0 ─────────┼─────── bucket 1 ────── ...
    bucket 0, then 1, ...     move its gradients into one flat tensor ─▶ all-reduce ─▶ each gradient is a view into it

    buckets = partition(parameters[::-1], bucket_bytes, bucket_bytes)      once
    loss_of(model, this rank's part of the batch).backward()               each step
    reduce_gradients(buckets, comm)
    optimizer.step()                                                       the same on every rank

With n bytes of gradients, each rank sends 2 (P - 1)/P n bytes. With one rank as the server
(`algorithm="central"`), each rank sends n bytes, and the server sends (P - 1) n.

With `op="sum"` gradients are summed: if each rank divides its loss by the global number of tokens,
the sum is exactly the serial gradient. `op="mean"` is torch's convention: it suits loops that
divide by the local number of tokens. The classes in `after_backward.py` have no default: the wrong
one would make all gradients P times too large or too small, without a word. (Li et al. 2020,
sections 2.2 and 3.2.)
"""

from torch import nn

from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.ddp.flatten import take_gradients, views_into
from minidist.full.placement import copies_of


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
