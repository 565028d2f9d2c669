# task 5: remembers the magnitudes of the last cast of a step and forgets those before.
from solution import *  # noqa: F403
from solution import DelayedScale


class DelayedScale(DelayedScale):
    def cast(self, x):
        self.scale.amax = self.scale.amax * 0
        return super().cast(x)
