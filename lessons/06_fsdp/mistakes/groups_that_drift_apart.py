# task 4: sums gradients inside the group only, so the replicas of the groups drift apart.
from solution import *  # noqa: F403
from solution import ShardedModel


class HybridModel(ShardedModel):
    def __init__(self, modules, comm, shard_ranks):
        super().__init__(modules, comm.split(comm.rank // shard_ranks))
