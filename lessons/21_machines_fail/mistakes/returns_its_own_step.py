# task 2: returns how many steps the rank had taken itself, so that ranks go on with different batches.
import solution
from solution import *  # noqa: F403


def recover(mine, take_step, arrays, comm):
    solution.recover(mine, take_step, arrays, comm)
    return mine.done
