# task 5: takes a run with checkpoints to be safe from a hang: nobody ends the job that waits.
import solution
from solution import *  # noqa: F403


def undefended(plan):
    found = solution.undefended(plan)
    return found - {"hang"} if plan.every and plan.shared else found
