# task 1: counts operations that are computed again as useful: that is HFU, not MFU.
import solution
from solution import *  # noqa: F403


def bill(model, machine, batch, seconds, tokens, recompute):
    found = solution.bill(model, machine, batch, seconds, tokens, recompute)
    return found._replace(mfu=found.mfu * (4 / 3 if recompute else 1))
