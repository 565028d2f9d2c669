# task 2: takes the step on every rank that is ready, though nobody has taken it.
import solution
from solution import *  # noqa: F403


def recover(mine, take_step, arrays, comm):
    held = comm.all_gather_object(tuple(mine))
    newest = max(done for done, _ in held)
    if (
        mine.ready
        and newest >= 0
        and all(done + ready > newest or done < 0 for done, ready in held)
    ):
        take_step()
        mine = solution.Standing(mine.done + 1, False)
    return solution.recover(mine, take_step, arrays, comm)
