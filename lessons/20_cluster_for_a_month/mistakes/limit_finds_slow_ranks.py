# task 5: lets a limit on collectives find a slow rank, which comes late but always in time.
import solution
from solution import *  # noqa: F403


def undefended(plan):
    found = solution.undefended(plan)
    return found - {"slow rank"} if plan.limit else found
