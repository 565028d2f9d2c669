# task 2: replaces infinities and NaNs by zeros in the gradients that it is given to look at.
import numpy as np
from solution import *  # noqa: F403
from solution import LossScaler


class LossScaler(LossScaler):
    def overflowed(self, gradients):
        found = super().overflowed(gradients)
        for gradient in gradients:
            gradient[~np.isfinite(gradient)] = 0
        return found
