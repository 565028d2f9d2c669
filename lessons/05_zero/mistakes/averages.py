# task 2: divides the summed gradients by the number of ranks, though the losses are parts of one loss already.
import solution
from solution import *  # noqa: F403


class ZeRO1(solution.ZeRO1):
    def _scattered(self, gradients):
        return super()._scattered(gradients) / self.comm.size
