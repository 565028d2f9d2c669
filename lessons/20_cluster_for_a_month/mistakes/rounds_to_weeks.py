# task 1: rounds the time up to whole weeks.
import math

import solution
from solution import *  # noqa: F403


def bill(model, machine, batch, seconds, tokens, recompute):
    found = solution.bill(model, machine, batch, seconds, tokens, recompute)
    days = 7 * math.ceil(found.days / 7)
    return found._replace(days=days, money=found.money * days / found.days)
