# task 2: lets the scale go below 1.
from solution import *  # noqa: F403
from solution import LossScaler


class LossScaler(LossScaler):
    def update(self, overflow):
        if overflow:
            self.scale, self.good_steps = self.scale * self.backoff, 0
        else:
            super().update(overflow)
