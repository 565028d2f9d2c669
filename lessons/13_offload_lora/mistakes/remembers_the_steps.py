# task 4: remembers the number of steps between calls, instead of reading it from the state.
import solution
import torch
from solution import *  # noqa: F403

STEPS = {}


class Remembering:
    def __init__(self, slow):
        self.slow = slow

    def fetch(self, number):
        done = STEPS.get((id(self.slow), number), 0)
        STEPS[id(self.slow), number] = done + 1
        return self.slow.fetch(number) | {"step": torch.tensor(float(done))}

    def keep(self, number, state):
        self.slow.keep(number, state)


def offloaded_step(parameters, slow, *rest, **options):
    solution.offloaded_step(parameters, Remembering(slow), *rest, **options)
