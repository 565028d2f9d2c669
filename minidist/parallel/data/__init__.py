"""Data parallelism: every rank has a full model and a part of the batch.

Read `data_parallel.py`: the naive ways first, then DDP; then `buckets.py`. `backward.py` is what strategies hook into,
`replicas.py` makes ranks equal at the start, `sampler.py` deals out the samples.
"""
