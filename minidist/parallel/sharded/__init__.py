"""ZeRO 1, 2 and 3: the optimizer's state, the gradients and the parameters are shared out.

Read `plain.py` first: all three stages as loops. Then `shard.py` (a rank's part of several parameters) and `zero.py`
(stages 1 and 2, during backward). Stage 3 gathers and frees *units*, parameters that are used together: `units.py` is
the life of one, `sharded_model.py` says how many are whole at a time and gathers one ahead (prefetch), and `fsdp.py`
says which is next, and when. `zero_plus_plus.py` sends fewer bytes, `sharded_optimizer.py` shards the state alone.

What these use: `policy.py` chooses the units, `same_steps.py` compares what the ranks do, `storage.py` frees memory
that others still view, and `whole.py` makes the state whole, to save or load it.
"""

from minidist.parallel.sharded.plain import PlainUnit, PlainZeRO

__all__ = ["PlainUnit", "PlainZeRO"]
