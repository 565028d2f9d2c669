# task 2: gets the arrays from a peer though it could take the step itself.
import solution
from solution import *  # noqa: F403


def recover(mine, take_step, arrays, comm):
    return solution.recover(mine._replace(ready=False), take_step, arrays, comm)
