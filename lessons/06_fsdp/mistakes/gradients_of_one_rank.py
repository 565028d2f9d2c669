# task 3: keeps its part of its own gradients, and never adds those of the other ranks.
import torch
from solution import *  # noqa: F403
from solution import HybridModel, in_plain_memory

from minidist.full import FSDP
from minidist.full.fsdp.flat import Direct


class OfOneRank(Direct):
    def reduce(self, gradient, flat, op):
        return torch.split(gradient, flat.shard.counts)[self.link.rank].clone()


class Alone(FSDP):
    def _make_transport(self, parameters):
        return OfOneRank(self.ranks.link(parameters))


class ShardedModel(HybridModel):
    def __init__(self, modules, comm):
        self.model = Alone(torch.nn.Sequential(*modules), comm, "sum", allocate=in_plain_memory)
        self.shards = [flat.shard.values for flat in self.model.flats]
