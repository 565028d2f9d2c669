# task 2: takes an outer step twice as long; of two sites that looks like a sum for the mean.
import solution
from solution import *  # noqa: F403


class OuterStep(solution.OuterStep):
    def __init__(self, parameters, comm, every, lr, momentum):
        super().__init__(parameters, comm, every, 2 * lr, momentum)
