# task 4: takes m - 1 for m in the formula.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    m, p = batch // layout.dp // layout.microbatch, layout.pp
    return found._replace(formula=(p - 1) / (layout.chunks * (m - 1) + p - 1))
