# task 5: compares the hours of the steps with those that are rented, as if nothing failed.
import solution
from solution import *  # noqa: F403


def undefended(plan):
    found = solution.undefended(plan) - {"late end"}
    return found | ({"late end"} if plan.hours > plan.rented else set())
