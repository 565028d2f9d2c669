# task 2: all-reduces the gradients and takes its slice of the sum: half as many bytes again as are needed.
import solution
from solution import *  # noqa: F403

from minidist.collectives import all_reduce


class ZeRO1(solution.ZeRO1):
    def _scattered(self, gradients):
        total = gradients.clone()
        all_reduce(total, self.stream.comm)
        return total.tensor_split(self.comm.size)[self.comm.rank]
