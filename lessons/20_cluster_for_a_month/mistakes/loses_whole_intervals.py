# task 5: loses a whole interval with each failure; on average it is half of one.
import solution
from solution import *  # noqa: F403


def undefended(plan):
    found = solution.undefended(plan) - {"late end"}
    safe = plan.every > 0 and plan.shared
    failures = plan.hours * plan.gpus / plan.gpu_mtbf
    late = (
        plan.hours + failures * ((plan.every if safe else plan.hours / 2) + plan.restart)
        > plan.rented
    )
    return found | ({"late end"} if late else set())
