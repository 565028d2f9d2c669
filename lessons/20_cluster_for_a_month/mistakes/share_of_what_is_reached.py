# task 1: divides by what a GPU reaches, not by its peak, so that the share looks better.
import solution
from solution import *  # noqa: F403


def bill(model, machine, batch, seconds, tokens, recompute):
    found = solution.bill(model, machine, batch, seconds, tokens, recompute)
    return found._replace(mfu=found.mfu / machine.reached)
