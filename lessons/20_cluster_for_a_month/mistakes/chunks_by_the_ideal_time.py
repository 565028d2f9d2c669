# task 4: wants 15 % of the ideal time of the chunks; the limit is 15 % of the step.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    p, m = layout.pp, batch // (layout.dp * layout.microbatch)
    if found.remedy != "chunks":
        return found
    dealt = [k for k in range(found.to, model.layers // p + 1) if model.layers % (p * k) == 0]
    return found._replace(to=next((k for k in dealt if (p - 1) / (k * m) <= 0.15), dealt[-1]))
