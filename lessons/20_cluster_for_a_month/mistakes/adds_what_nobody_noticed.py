# task 5: adds the hours until somebody looks at the loss to those of the run.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def undefended(plan):
    found = solution.undefended(plan) - {"late end"}
    late = "late end" in solution.undefended(replace(plan, rented=plan.rented - plan.noticed))
    return found | {"late end"} if late else found
