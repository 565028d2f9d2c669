# task 3: updates the float16 weight, where a small step is rounded away, and copies it to the master.
import numpy as np
from solution import *  # noqa: F403


class MasterWeights:
    def __init__(self, weights, rate):
        self.weights, self.rate = weights, rate
        self.masters = [weight.astype(np.float32) for weight in weights]

    def step(self, gradients, scale, limit):
        wide = [gradient.astype(np.float32) / scale for gradient in gradients]
        norm = float(np.sqrt(sum(np.square(gradient).sum() for gradient in wide)))
        for weight, master, gradient in zip(self.weights, self.masters, wide, strict=True):
            weight -= (self.rate * min(1, limit / norm) * gradient).astype(np.float16)
            master[...] = weight
        return norm
