# task 5: takes shared storage for a defence where no checkpoint is written to it.
import solution
from solution import *  # noqa: F403


def undefended(plan):
    found = solution.undefended(plan)
    return found - {"dead node"} if plan.shared else found
