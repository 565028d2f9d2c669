# task 2: calls AdamW's step once for each parameter instead of once for all: it counts too many steps.
import solution
from solution import *  # noqa: F403


class ZeRO1(solution.ZeRO1):
    def step(self):
        for _ in self.slices:
            self.adamw.step()
