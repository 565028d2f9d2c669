"""ZeRO 1, 2 and 3: the optimizer's state, the gradients and the parameters are shared out.

Read `shard.py` (a rank's part of several parameters), then `zero.py` (stages 1 and 2), then for stage 3 `units.py`, the
life of a unit, `sharded_model.py` and `fsdp.py`, which says when. `zero_plus_plus.py` sends fewer bytes.
"""
