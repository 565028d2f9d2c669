# task 5: has nobody train while one replica is out.
import solution
from solution import *  # noqa: F403


def goodput(mtbf, step, stall, out, replicas):
    return solution.goodput(mtbf, step, stall, out, 1)
