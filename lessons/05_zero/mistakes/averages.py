# task 2: divides the summed gradients by the number of ranks, though the losses are parts of one loss already.
import solution
from solution import *  # noqa: F403


class ZeRO1(solution.ZeRO1):
    def reduce(self):
        super().reduce()
        for unit in self.units:
            unit.shard.grad /= unit.comm.size
