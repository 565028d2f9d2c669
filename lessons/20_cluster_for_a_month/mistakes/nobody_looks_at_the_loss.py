# task 5: takes a loss at which nobody looks for one that is noticed at once.
import solution
from solution import *  # noqa: F403


def undefended(plan):
    found = solution.undefended(plan)
    return found - {"bad loss"} if plan.noticed == 0 else found
