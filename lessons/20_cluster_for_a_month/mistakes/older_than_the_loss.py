# task 5: wants a checkpoint that is older than the loss that went wrong; as old is enough.
import solution
from solution import *  # noqa: F403


def undefended(plan):
    found = solution.undefended(plan)
    return found | {"bad loss"} if (plan.kept - 1) * plan.every <= plan.noticed else found
