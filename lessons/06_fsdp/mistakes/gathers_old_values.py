# task 2: gathers a copy that it made at the start, so what the optimizer did to the shard never comes round.
from solution import *  # noqa: F403
from solution import ShardedUnit


class ShardedUnit(ShardedUnit):
    def __init__(self, module, comm):
        super().__init__(module, comm)
        self.shard = self.shard.clone()
