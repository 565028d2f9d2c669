# task 5: returns less than nothing where a replica is out longer than the others last.
from math import exp

from solution import *  # noqa: F403


def goodput(mtbf, step, stall, out, replicas):
    gone = step / 2 / mtbf + out / mtbf / replicas
    return (1 - gone) * exp(-2 * stall / mtbf)
