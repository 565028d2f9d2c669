# task 4: calls a barrier before the rows are dealt out, which sends messages that nobody needs.
import solution
from solution import *  # noqa: F403


def farm(rows, shape, work, comm):
    comm.barrier()
    return solution.farm(rows, shape, work, comm)
