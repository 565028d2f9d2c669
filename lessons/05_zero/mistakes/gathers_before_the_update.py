# task 2: gathers the slices, then updates them, so all others' parameters are those of the step before.
import solution
from solution import *  # noqa: F403


class ZeRO1(solution.ZeRO1):
    def step(self):
        for unit in self.units:
            unit.unshard()
        self.adamw.step()
