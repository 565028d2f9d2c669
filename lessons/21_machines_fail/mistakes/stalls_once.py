# task 5: has all ranks stand still once, not again when the replica is back.
import solution
from solution import *  # noqa: F403


def goodput(mtbf, step, stall, out, replicas):
    return solution.goodput(mtbf, step, stall / 2, out, replicas)
