# task 4: compares the idle share of the step with (p - 1)/(v m), the share of the ideal time.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    m = batch // (layout.dp * layout.microbatch)
    return found._replace(formula=(layout.pp - 1) / (layout.chunks * m))
