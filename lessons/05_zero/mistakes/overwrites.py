# task 3: a slice's gradient becomes what came last, so of several backwards only the last one counts.
import solution
from solution import *  # noqa: F403


class ZeRO2(solution.ZeRO2):
    def _take_over(self, shard, reduced):
        shard.gradient = reduced
