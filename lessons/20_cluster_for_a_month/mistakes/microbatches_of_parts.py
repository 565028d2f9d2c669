# task 4: names a number of microbatches that does not divide the replica's sequences.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    if found.remedy != "microbatches":
        return found
    p, v = layout.pp, layout.chunks
    return found._replace(
        to=next(k for k in range(1, 10**6) if 100 * (p - 1) <= 15 * (v * k + p - 1))
    )
