# task 4: alone, gives all rows to `work` at once, which takes one row: it is right only if `work` happens to bear that.
import solution
from solution import *  # noqa: F403


def farm(rows, shape, work, comm):
    return work(rows) if comm.size == 1 else solution.farm(rows, shape, work, comm)
