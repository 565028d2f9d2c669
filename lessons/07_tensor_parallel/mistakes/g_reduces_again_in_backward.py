# task 1: g sums the gradients in backward as well: every gradient behind it is P times too large.
from solution import *  # noqa: F403
from solution import copy_to as enter
from solution import reduce_from as leave


def reduce_from(x, comm):
    return leave(enter(x, comm), comm)
