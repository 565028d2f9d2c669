# task 2: goes on counting good steps over an overflow, and so grows again too early.
from solution import *  # noqa: F403
from solution import LossScaler


class LossScaler(LossScaler):
    def update(self, overflow):
        before = self.good_steps
        super().update(overflow)
        if overflow:
            self.good_steps = before
