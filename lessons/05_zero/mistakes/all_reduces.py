# task 2: all-reduces the gradients and takes its slice of the sum: half as many bytes again as are needed.
import solution
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


class ZeRO1(solution.ZeRO1):
    def reduce(self):
        for unit in self.units:
            total = unit.parameters[0].grad.flatten()
            all_reduce(total, unit.comm)
            unit.shard.grad = total.tensor_split(unit.comm.size)[unit.comm.rank].clone()
