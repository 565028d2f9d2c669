# task 3: all-reduces whole gradients and then takes its part: the right sums for twice the bytes.
import torch
from solution import *  # noqa: F403
from solution import HybridModel, in_plain_memory

from minidist.collectives import all_reduce
from minidist.parallel import FSDP


class AllReducing(FSDP):
    def _reduce(self, name, gradients):
        for flat, gradient in gradients:
            all_reduce(gradient, self.stream.comm)
            flat.add_gradient(torch.split(gradient, flat.counts)[self.comm.rank].clone())


class ShardedModel(HybridModel):
    def __init__(self, modules, comm):
        self.model = AllReducing(
            torch.nn.Sequential(*modules), comm, "sum", allocate=in_plain_memory
        )
        self.shards = [flat.values for flat in self.model.flats]
