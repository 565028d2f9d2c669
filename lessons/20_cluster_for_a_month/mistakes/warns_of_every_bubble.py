# task 4: names a remedy for bubbles of 15 % or less, too.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    if found.remedy != "nothing":
        return found
    return found._replace(remedy="microbatches", to=batch // layout.dp)
