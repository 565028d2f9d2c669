# task 2: all-reduces the scale in each step, too, though it is the same on all ranks.
import numpy as np
from solution import *  # noqa: F403
from solution import LossScaler

from minidist.full.collectives import all_reduce


class LossScaler(LossScaler):
    def __init__(self, comm, **options):
        super().__init__(comm, **options)
        self.comm = comm

    def overflowed(self, gradients):
        scale = np.array([self.scale], np.float32)
        all_reduce(scale, self.comm, op="max")
        return super().overflowed(gradients)
