"""Data parallelism: every rank has a full model and a part of the batch.

Read `plain.py` first: buckets of gradients, summed after backward. Then `buckets.py`, what a bucket is and which
parameters share one, and `data_parallel.py`: DDP, which sums buckets while backward still runs, and decides in which
order. `strategy.py` has what all strategies share, `backward.py` is what they hook into, `replicas.py` makes ranks
equal at the start, `sampler.py` deals out the samples.
"""

from minidist.parallel.data.data_parallel import DDP
from minidist.parallel.data.plain import NaiveDataParallel, ParameterServer, PlainDataParallel, reduce_gradients

__all__ = ["DDP", "NaiveDataParallel", "ParameterServer", "PlainDataParallel", "reduce_gradients"]
