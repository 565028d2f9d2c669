# task 3: the last module stays whole after forward, since its backward comes next.
import torch
from solution import *  # noqa: F403
from solution import ShardedUnit

from minidist.full.collectives import reduce_scatter


class ShardedModel:
    def __init__(self, modules, comm):
        self.comm = comm
        self.units = [ShardedUnit(module, comm) for module in modules]
        self.shards = [unit.shard for unit in self.units]

    def forward(self, x):
        self.ends = []
        for unit in self.units:
            x = x.detach().requires_grad_()
            unit.gather()
            output = unit.module(x)
            if unit is not self.units[-1]:
                unit.release()
            self.ends.append((x, output))
            x = output
        return x.detach()

    def backward(self, gradient):
        shards = []
        for unit in reversed(self.units):
            x, output = self.ends.pop()
            if unit is not self.units[-1]:
                unit.gather()
            output.backward(gradient)
            gradient = x.grad
            parts = [parameter.grad.flatten() for parameter in unit.module.parameters()]
            for parameter in unit.module.parameters():
                parameter.grad = None
            unit.release()
            shards.append(reduce_scatter(torch.cat(parts), self.comm))
        return shards[::-1]
