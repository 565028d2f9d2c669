# task 5: scales by the tensor that it is about to cast: precise, but that needs a second pass, and a message each time.
from solution import *  # noqa: F403
from solution import DelayedScale, quantize, scale_for


class DelayedScale(DelayedScale):
    def cast(self, x):
        super().cast(x)
        scale = scale_for(abs(x).max())
        return quantize(x, scale), scale
