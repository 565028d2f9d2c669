# task 3: clips the scaled gradients and unscales them then, so the limit is `scale` times too small.
from solution import *  # noqa: F403
from solution import MasterWeights


class MasterWeights(MasterWeights):
    def step(self, gradients, scale, limit):
        return super().step(gradients, scale, limit / scale)
