# task 5: trusts the newest checkpoint, which may be the one that was being written.
import solution
from solution import *  # noqa: F403


def undefended(plan):
    found = solution.undefended(plan)
    return found - {"torn checkpoint"} if plan.every else found
