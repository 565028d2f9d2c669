# task 4: takes it that every worker gets a row in every round; left over rows are never dealt out.
import solution
from solution import *  # noqa: F403


def farm(rows, shape, work, comm):
    if comm.size == 1:
        return solution.farm(rows, shape, work, comm)
    full = shape[0] // (comm.size - 1) * (comm.size - 1)
    return solution.farm(None if rows is None else rows[:full], (full, shape[1]), work, comm)
