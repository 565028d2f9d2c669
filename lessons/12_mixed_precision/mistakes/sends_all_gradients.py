# task 2: all-reduces the gradients themselves to look for an overflow, where one number would tell.
import numpy as np
from solution import *  # noqa: F403
from solution import LossScaler

from minidist.full.collectives import all_reduce


class LossScaler(LossScaler):
    def overflowed(self, gradients):
        bad = ~np.isfinite(np.concatenate([gradient.ravel() for gradient in gradients]))
        flags = np.tile(bad.astype(np.uint8), 8)
        all_reduce(flags, self.comm, op="max")
        return bool(flags.any())
