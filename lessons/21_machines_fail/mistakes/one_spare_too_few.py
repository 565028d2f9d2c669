# task 5: lets a failure find a spare when as many machines are in repair as there are spares.
import solution
from solution import *  # noqa: F403


def spares(machines, mtbf, repair, risk):
    return max(0, solution.spares(machines, mtbf, repair, risk) - 1)
