# task 4: fetches all states before the first update: fast memory holds what was to be offloaded.
import solution
from solution import *  # noqa: F403


class Fetched:
    def __init__(self, states):
        self.states = states

    def fetch(self, number):
        return self.states[number]

    def keep(self, number, state):
        self.states[number] = state


def offloaded_step(parameters, slow, **options):
    used = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
    fast = Fetched({number: slow.fetch(number) for number in used})
    solution.offloaded_step(parameters, fast, **options)
    for number in used:
        slow.keep(number, fast.states[number])
