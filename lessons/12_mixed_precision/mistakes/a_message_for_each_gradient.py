# task 2: all-reduces a flag of its own for each gradient.
from solution import *  # noqa: F403
from solution import LossScaler


class LossScaler(LossScaler):
    def overflowed(self, gradients):
        found = [super(LossScaler, self).overflowed([gradient]) for gradient in gradients]
        return any(found)
