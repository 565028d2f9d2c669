# task 2: raises where the next scale would be below 1, though the scale could still stop at 1.
from solution import *  # noqa: F403
from solution import LossScaler


class LossScaler(LossScaler):
    def update(self, overflow):
        if overflow and self.scale * self.backoff < 1:
            raise FloatingPointError("the scale would be below 1")
        super().update(overflow)
