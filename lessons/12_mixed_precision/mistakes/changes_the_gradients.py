# task 3: clips the scaled gradients in place, though they belong to the caller.
import numpy as np
import solution
from solution import *  # noqa: F403


class MasterWeights(solution.MasterWeights):
    def step(self, gradients, scale, limit):
        norm = super().step(gradients, scale, limit)
        for gradient in gradients:
            gradient *= np.float16(min(1.0, limit / norm))
        return norm
