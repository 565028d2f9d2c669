# task 4: fetches the next state when the present parameter is updated already: nothing goes on beside.
import solution
from solution import *  # noqa: F403


class Late:
    """Hands a state out when it is asked for, and asks the slow memory one update later."""

    def __init__(self, slow):
        self.slow, self.waiting = slow, None

    def fetch(self, number):
        if self.waiting is None:
            self.waiting = {}
            return self.slow.fetch(number)
        self.waiting = State(self.slow, number)
        return self.waiting

    def keep(self, number, state):
        if isinstance(self.waiting, State):
            self.waiting.fill()
        self.slow.keep(number, state)


class State(dict):
    """A state that is fetched once the update before it is done."""

    def __init__(self, slow, number):
        super().__init__()
        self.slow, self.number = slow, number

    def fill(self):
        if not self:
            self.update(self.slow.fetch(self.number))


def offloaded_step(parameters, slow, **options):
    solution.offloaded_step(parameters, Late(slow), **options)
