"""ZeRO 1, 2 and 3: the optimizer's state, the gradients and the parameters are shared out.

Read `plain.py` first: all three stages as loops. Then `shard.py` (a rank's part of several parameters), `zero.py`
(stages 1 and 2 during backward), and for stage 3 `units.py`, the life of a unit, `sharded_model.py` and `fsdp.py`,
which says when. `zero_plus_plus.py` sends fewer bytes.
"""

from minidist.parallel.sharded.plain import PlainUnit, PlainZeRO

__all__ = ["PlainUnit", "PlainZeRO"]
