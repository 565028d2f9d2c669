# task 2: each rank looks at its own gradients only: one skips the step that the others take, and scales drift apart.
import numpy as np
from solution import *  # noqa: F403
from solution import LossScaler


class LossScaler(LossScaler):
    def overflowed(self, gradients):
        return not all(np.isfinite(gradient).all() for gradient in gradients)
