# task 4: all-reduces whole gradients across the groups before it scatters them inside: too many bytes cross.
import torch
from solution import *  # noqa: F403
from solution import HybridModel, in_plain_memory

from minidist.full import FSDP
from minidist.full.collectives import all_reduce, reduce_scatter
from minidist.full.fsdp.flat import Direct


class Whole(Direct):
    def __init__(self, link, across):
        super().__init__(link, across)
        self.across = across

    def reduce(self, gradient, flat, op):
        all_reduce(gradient, self.across)
        return reduce_scatter(gradient, self.link)


class AcrossFirst(FSDP):
    def _make_transport(self, parameters):
        return Whole(self.ranks.link(parameters), self.ranks.across)


class HybridModel(HybridModel):
    def __init__(self, modules, comm, shard_ranks):
        options = {"allocate": in_plain_memory, "shard_ranks": shard_ranks}
        self.model = AcrossFirst(torch.nn.Sequential(*modules), comm, "sum", **options)
        self.shards = [flat.shard.values for flat in self.model.flats]
