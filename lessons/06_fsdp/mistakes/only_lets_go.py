# task 2: lets the parameters go but does not free them: autograd has saved them, and keeps them until backward.
import torch
from solution import *  # noqa: F403
from solution import ShardedUnit, cut, views_into

from minidist.full.collectives import all_gather


class ShardedUnit(ShardedUnit):
    def __init__(self, module, comm):
        self.module, self.comm, self.parameters = module, comm, list(module.parameters())
        self.shard, _ = cut(self.parameters, comm)
        self.release()

    def gather(self):
        count = sum(parameter.numel() for parameter in self.parameters)
        counts = [len(part) for part in torch.tensor_split(torch.empty(count), self.comm.size)]
        whole = all_gather(self.shard, self.comm, counts=counts)
        for parameter, view in zip(
            self.parameters, views_into(whole, self.parameters), strict=True
        ):
            parameter.data = view

    def release(self):
        for parameter in self.parameters:
            parameter.data = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
