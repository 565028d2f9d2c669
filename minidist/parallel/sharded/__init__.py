"""ZeRO 1, 2 and 3: the optimizer's state, the gradients and the parameters are shared out.

Read `plain.py` first: all three stages as loops. Then read `shard.py` (a rank's part of several
parameters) and `zero.py` (stages 1 and 2, during backward). Stage 3 gathers and frees *units*,
parameters that are used together: `units.py` is the life of one unit, `sharded_model.py` limits how
many are whole at a time and gathers one ahead, and `fsdp.py` says which unit is next, and when.
`zero_plus_plus.py` sends fewer bytes, `sharded_optimizer.py` shards the optimizer's state alone.

`methods.py` gathers a unit for methods that are not `forward`.

Helpers: `policy.py` chooses the units, `same_steps.py` compares what the ranks do, and `whole.py`
makes the state whole, to save or load it.

A `Shard` is this rank's part of parameters laid end to end. A `BucketShard` is one whose parameters
stay whole (ZeRO 1 and 2); a `Flat` is one whose parameters are freed between uses, and a `Unit` has
a `Flat` for each dtype (ZeRO 3).
"""

from minidist.parallel.sharded.plain import PlainUnit, PlainZeRO

__all__ = ["PlainUnit", "PlainZeRO"]
