# task 5: takes one machine's failures for the whole job's.
import solution
from solution import *  # noqa: F403


def spares(machines, mtbf, repair, risk):
    return solution.spares(1, mtbf, repair, risk)
