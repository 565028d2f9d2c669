# task 2: looks for infinite elements only, and steps on gradients that are not a number.
import numpy as np
from solution import *  # noqa: F403
from solution import LossScaler

from minidist.full.collectives import all_reduce


class LossScaler(LossScaler):
    def overflowed(self, gradients):
        found = np.array([any(np.isinf(gradient).any() for gradient in gradients)], np.uint8)
        all_reduce(found, self.comm, op="max")
        return bool(found[0])
