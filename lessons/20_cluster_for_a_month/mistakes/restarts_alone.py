# task 5: counts the restarts after failures, and forgets the work that is lost.
import solution
from solution import *  # noqa: F403


def undefended(plan):
    found = solution.undefended(plan) - {"late end"}
    late = plan.hours + plan.hours * plan.gpus / plan.gpu_mtbf * plan.restart > plan.rented
    return found | ({"late end"} if late else set())
