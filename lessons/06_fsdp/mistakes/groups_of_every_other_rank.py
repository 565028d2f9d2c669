# task 4: makes groups of every M-th rank: on a cluster each group then lies across all nodes.
from honest import HybridModel as Right
from honest import ShardedModel as Sharded
from solution import *  # noqa: F403


class HybridModel(Right):
    def __init__(self, modules, comm, shard_ranks):
        place, group = divmod(comm.rank, comm.size // shard_ranks)
        Sharded.__init__(self, modules, comm.split(group))
        self.replicas = comm.split(place)
