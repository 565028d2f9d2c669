# task 3: all-reduces whole gradients and then takes its part: the right sums for twice the bytes.
import torch
from solution import *  # noqa: F403
from solution import HybridModel, in_plain_memory

from minidist.full import FSDP
from minidist.full.collectives import all_reduce
from minidist.full.fsdp.flat import Direct


class Whole(Direct):
    def reduce(self, gradient, flat, op):
        all_reduce(gradient, self.link)
        return torch.split(gradient, flat.shard.counts)[self.link.rank].clone()


class AllReducing(FSDP):
    def _make_transport(self, parameters):
        return Whole(self.ranks.link(parameters))


class ShardedModel(HybridModel):
    def __init__(self, modules, comm):
        self.model = AllReducing(
            torch.nn.Sequential(*modules), comm, "sum", allocate=in_plain_memory
        )
        self.shards = [flat.shard.values for flat in self.model.flats]
