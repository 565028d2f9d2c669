# task 4: divides the idle time by the time without it.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    return found._replace(measured=idle / (seconds - idle))
