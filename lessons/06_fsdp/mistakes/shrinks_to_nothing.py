# task 2: lets go by making the parameters empty, and gathers into memory of which they are no views any more.
import torch
from solution import *  # noqa: F403
from solution import ShardedUnit, cut, views_into

from minidist.full.collectives import all_gather


class ShardedUnit(ShardedUnit):
    def __init__(self, module, comm):
        self.module, self.comm, self.parameters = module, comm, list(module.parameters())
        self.shard, _ = cut(self.parameters, comm)
        count = sum(parameter.numel() for parameter in self.parameters)
        self.counts = [len(part) for part in torch.tensor_split(torch.empty(count), comm.size)]
        self.whole = torch.empty(count, dtype=self.shard.dtype)
        for parameter, view in zip(
            self.parameters, views_into(self.whole, self.parameters), strict=True
        ):
            parameter.data = view
        self.release()

    def gather(self):
        gathered = all_gather(self.shard, self.comm, counts=self.counts)
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.whole.copy_(gathered)

    def release(self):
        self.whole.untyped_storage().resize_(0)
        for parameter in self.parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
