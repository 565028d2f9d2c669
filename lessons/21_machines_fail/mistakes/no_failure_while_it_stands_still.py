# task 5: lets no failure come while the job stands still.
from solution import *  # noqa: F403


def goodput(mtbf, step, stall, out, replicas):
    return max(0.0, 1 - step / 2 / mtbf - out / mtbf / replicas) * (1 - 2 * stall / mtbf)
