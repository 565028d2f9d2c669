"""Tensor parallelism: every matrix is cut; and sequence parallelism between the cuts.

    the book                     here
    copy_to (f)                  `Boundary.enter`, once for a region (`ParallelRegion` in `styles.py`)
    gate, up                     `ColumnParallelLinear`, in place of the module's own layer
    down                         `RowParallelLinear`
    reduce_from (g)              `Boundary.leave`; sequence parallelism has another boundary (`sequence.py`)
    cut                          `shard` (`full/placement.py`), which leaves a rank its part and records it
    cross_entropy_sum            `vocabulary_parallel_cross_entropy_sum`
    tensor_parallel              `parallelize_tensor`, for any model, by a plan of name patterns

Read `minidist/tensor.py` first, then `full/adjoint.py`, `tensor_parallel.py`, `vocabulary.py` and
`sequence.py`. `styles.py` and `plan.py` apply them to a serial model from outside; `layers.py` has
layers that are built directly. `options.py` has what a user can ask for.
"""
