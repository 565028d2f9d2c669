# task 4: takes the batch of all replicas for that of one.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    return solution.diagnose(model, layout, batch * layout.dp, seconds, idle)
