# task 5: takes a whole step to be lost; on average it is half of one.
import solution
from solution import *  # noqa: F403


def goodput(mtbf, step, stall, out, replicas):
    return solution.goodput(mtbf, 2 * step, stall, out, replicas)
