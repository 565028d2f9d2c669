# task 4: names more microbatches for every long bubble, also where the schedule is not at fault.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    if found.remedy in ("nothing", "microbatches"):
        return found
    return found._replace(remedy="microbatches", to=batch // layout.dp)
