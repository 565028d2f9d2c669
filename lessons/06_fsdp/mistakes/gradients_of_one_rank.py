# task 3: keeps its part of its own gradients, and never adds those of the other ranks.
import torch
from solution import *  # noqa: F403
from solution import HybridModel, in_plain_memory

from minidist.parallel import FSDP


class Alone(FSDP):
    def _reduce(self, name, gradients):
        for flat, gradient in gradients:
            flat.add_gradient(torch.split(gradient, flat.counts)[self.comm.rank].clone())


class ShardedModel(HybridModel):
    def __init__(self, modules, comm):
        self.model = Alone(torch.nn.Sequential(*modules), comm, "sum", allocate=in_plain_memory)
        self.shards = [flat.values for flat in self.model.flats]
