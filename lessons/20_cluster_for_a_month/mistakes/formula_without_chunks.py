# task 4: forgets the chunks in the formula.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    m = batch // (layout.dp * layout.microbatch)
    return found._replace(formula=(layout.pp - 1) / (m + layout.pp - 1))
