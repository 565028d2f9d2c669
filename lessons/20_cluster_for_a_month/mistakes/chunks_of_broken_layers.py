# task 4: names chunks that do not deal out the layers equally.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    m = batch // (layout.dp * layout.microbatch)
    if found.remedy not in ("chunks", "zero bubble"):
        return found
    p = layout.pp
    enough = next(k for k in range(layout.chunks + 1, 999) if 100 * (p - 1) <= 15 * (k * m + p - 1))
    return found._replace(remedy="chunks", to=enough)
