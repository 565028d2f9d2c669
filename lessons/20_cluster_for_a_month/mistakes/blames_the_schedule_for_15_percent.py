# task 4: changes the schedule where the formula says 15 % or less, if that is near what was measured.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    if found.remedy == "stages or links" and found.measured <= 1.5 * found.formula:
        return found._replace(remedy="zero bubble")
    return found
