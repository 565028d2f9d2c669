"""ZeRO 1 and 2: the optimizer's state and the gradients are shared out.

    the book                  here
    Unit                      a bucket (`full/ddp/buckets.py`), and its `BucketShard`
    reduce_scatter            phase 1: `launch` and `_reduce`, on a stream
    the optimizer's step      phase 2: of `optimizer(kind, ...)`, which is over slices
    unshard, in `publish`     phase 3: `stepped`, with which the optimizer's step ends

Read `minidist/zero.py` first: all stages as loops, then stages 1 and 2 by hooks. `zero.py` of this
folder has the same three phases during backward and at its end.
"""
