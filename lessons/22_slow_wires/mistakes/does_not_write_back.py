# task 2: each site goes on from its own parameters.
import numpy as np
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


class OuterStep:
    def __init__(self, parameters, comm, every, lr, momentum):
        self.parameters, self.comm, self.every = parameters, comm, every
        self.lr, self.momentum, self.steps = lr, momentum, 0
        self.shared = [each.copy() for each in parameters]
        self.velocity = [np.zeros_like(each) for each in parameters]

    def stepped(self):
        self.steps += 1
        if self.steps % self.every:
            return
        for parameter, shared, velocity in zip(
            self.parameters, self.shared, self.velocity, strict=True
        ):
            change = shared - parameter
            all_reduce(change, self.comm, "mean")
            velocity[:] = self.momentum * velocity + change
            shared -= self.lr * (change + self.momentum * velocity)
