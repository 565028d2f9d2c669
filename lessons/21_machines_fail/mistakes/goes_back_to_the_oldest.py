# task 2: goes back to the oldest of what ranks hold: steps are lost.
import solution
from solution import *  # noqa: F403


def recover(mine, take_step, arrays, comm):
    held = comm.all_gather_object(tuple(mine))
    oldest = min((done for done, _ in held if done >= 0), default=-1)
    if mine.done > oldest:
        mine = solution.Standing(-1, False)
    return solution.recover(mine._replace(ready=False), take_step, arrays, comm)
