"""Data parallelism: every rank has a full model and a part of the batch.

Read `plain.py` first: it sums buckets of gradients after backward. Then read `buckets.py`, which
says what a bucket is and which parameters share one, and `data_parallel.py`: DDP sums the buckets
while backward still runs. `strategy.py` has what all strategies share, `backward.py` has their
hooks, `replicas.py` makes the ranks equal at the start, and `sampler.py` deals out the samples.
"""

from minidist.parallel.data.data_parallel import DDP
from minidist.parallel.data.plain import (
    NaiveDataParallel,
    ParameterServer,
    PlainDataParallel,
    reduce_gradients,
)

__all__ = ["DDP", "NaiveDataParallel", "ParameterServer", "PlainDataParallel", "reduce_gradients"]
