# task 2: updates its slice and does not gather those of the others: each rank goes on with another model.
import solution
from solution import *  # noqa: F403


class ZeRO1(solution.ZeRO1):
    def step(self):
        self.adamw.step()
