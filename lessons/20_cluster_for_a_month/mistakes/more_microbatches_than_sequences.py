# task 4: gives a replica more microbatches than it has sequences: the batch is divided by dp first.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    if found.remedy not in ("microbatches", "chunks", "zero bubble"):
        return found
    p, v = layout.pp, layout.chunks
    enough = next(k for k in range(1, 10**6) if 100 * (p - 1) <= 15 * (v * k + p - 1))
    return found._replace(remedy="microbatches", to=enough)
