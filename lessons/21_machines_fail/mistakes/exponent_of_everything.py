# task 5: puts all losses into one exponent, though only a stall stops the job.
import math

from solution import *  # noqa: F403


def goodput(mtbf, step, stall, out, replicas):
    return math.exp(-(step / 2 + 2 * stall + out / replicas) / mtbf)
