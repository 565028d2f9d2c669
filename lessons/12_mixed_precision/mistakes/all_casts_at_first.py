# task 5: before the first update goes by the largest magnitude of all casts so far, not of this one alone.
from solution import *  # noqa: F403
from solution import DelayedScale, quantize, scale_for


class DelayedScale(DelayedScale):
    updated = False

    def cast(self, x):
        found = super().cast(x)
        if self.updated:
            return found
        scale = scale_for(float(self.scale.amax))
        return quantize(x, scale), scale

    def update(self):
        super().update()
        self.updated = True
