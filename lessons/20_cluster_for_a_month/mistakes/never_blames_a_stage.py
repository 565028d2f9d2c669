# task 4: does not look whether the measured bubble is far above its formula.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    if found.remedy != "stages or links":
        return found
    p, part = layout.pp, batch // layout.dp
    more = [
        k
        for k in range(1, part + 1)
        if part % k == 0 and 100 * (p - 1) <= 15 * (layout.chunks * k + p - 1)
    ]
    return found._replace(
        remedy="microbatches" if more else "zero bubble", to=more[0] if more else 0
    )
