# task 3: divides gradients by the scale in float16, which does not have what comes out.
import numpy as np
from solution import *  # noqa: F403


class MasterWeights:
    def __init__(self, weights, rate):
        self.weights, self.rate = weights, rate
        self.masters = [weight.astype(np.float32) for weight in weights]

    def step(self, gradients, scale, limit):
        unscaled = [(gradient / np.float16(scale)).astype(np.float32) for gradient in gradients]
        norm = float(np.sqrt(sum(np.square(gradient).sum() for gradient in unscaled)))
        factor = limit / norm if norm > limit else 1.0
        for weight, master, gradient in zip(self.weights, self.masters, unscaled, strict=True):
            master -= np.float32(self.rate * factor) * gradient
            weight[...] = master
        return norm
