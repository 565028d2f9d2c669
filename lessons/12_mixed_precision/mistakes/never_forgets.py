# task 5: goes by the largest magnitude ever seen, so one outlier costs precision for good.
from solution import *  # noqa: F403
from solution import DelayedScale


class DelayedScale(DelayedScale):
    def __init__(self, comm, history):
        super().__init__(comm, 1000)
