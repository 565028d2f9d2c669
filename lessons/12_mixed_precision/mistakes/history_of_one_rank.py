# task 5: remembers its own magnitudes only, so ranks multiply parts of one tensor by different scales.
from solution import *  # noqa: F403
from solution import DelayedScale


class DelayedScale(DelayedScale):
    def update(self):
        self.scale.remember(self.scale.amax)
