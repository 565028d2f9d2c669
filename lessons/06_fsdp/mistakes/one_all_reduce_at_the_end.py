# task 4: sums the shards of all units in one all-reduce at the end, which nothing is left to hide behind.
import torch
from honest import ShardedModel
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


class HybridModel(ShardedModel):
    def __init__(self, modules, comm, shard_ranks):
        group, place = divmod(comm.rank, shard_ranks)
        super().__init__(modules, comm.split(group))
        self.replicas = comm.split(place)

    def backward(self, gradient):
        shards = super().backward(gradient)
        together = torch.cat(shards)
        all_reduce(together, self.replicas)
        return [part.clone() for part in together.split([len(shard) for shard in shards])]
