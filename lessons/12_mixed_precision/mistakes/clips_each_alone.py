# task 3: clips each weight's gradient by its own norm, which changes the direction of the step.
import numpy as np
from solution import *  # noqa: F403


class MasterWeights:
    def __init__(self, weights, rate):
        self.weights, self.rate = weights, rate
        self.masters = [weight.astype(np.float32) for weight in weights]

    def step(self, gradients, scale, limit):
        norms = []
        for weight, master, gradient in zip(self.weights, self.masters, gradients, strict=True):
            wide = gradient.astype(np.float32) / scale
            norms.append(float(np.linalg.norm(wide)))
            master -= self.rate * min(1, limit / norms[-1]) * wide
            weight[...] = master
        return float(np.linalg.norm(norms))
