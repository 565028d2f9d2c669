# task 1: pays the price of a node for each of its GPUs.
import solution
from solution import *  # noqa: F403


def bill(model, machine, batch, seconds, tokens, recompute):
    found = solution.bill(model, machine, batch, seconds, tokens, recompute)
    return found._replace(money=found.money * machine.node)
