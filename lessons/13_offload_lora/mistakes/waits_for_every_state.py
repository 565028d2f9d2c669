# task 4: fetches a state only when the one before is back: the update stands still while each of them travels.
import solution
from solution import *  # noqa: F403


class Only:
    def __init__(self, slow, number):
        self.slow, self.number = slow, number

    def fetch(self, _):
        return self.slow.fetch(self.number)

    def keep(self, _, state):
        self.slow.keep(self.number, state)


def offloaded_step(parameters, slow, **options):
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None:
            solution.offloaded_step([parameter], Only(slow, number), **options)
