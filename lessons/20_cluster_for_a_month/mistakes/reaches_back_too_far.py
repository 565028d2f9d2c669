# task 5: lets k kept checkpoints reach back k intervals; right after one is written it is k - 1.
import solution
from solution import *  # noqa: F403


def undefended(plan):
    found = solution.undefended(plan) - {"bad loss"}
    bad = plan.noticed == 0 or plan.kept * plan.every < plan.noticed
    return found | ({"bad loss"} if bad else set())
