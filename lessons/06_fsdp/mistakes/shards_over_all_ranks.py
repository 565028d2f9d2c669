# task 4: cuts for all ranks, so every gathering crosses from group to group.
from solution import *  # noqa: F403
from solution import ShardedModel


class HybridModel(ShardedModel):
    def __init__(self, modules, comm, shard_ranks):
        super().__init__(modules, comm)
