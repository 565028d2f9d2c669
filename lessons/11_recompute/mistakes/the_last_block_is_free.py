# task 1: what the last block saves is used at once, so it does not count.
import solution
from solution import *  # noqa: F403


def account(plan, inputs, saved, seconds):
    return solution.account(plan, inputs, [*saved[:-1], 0], seconds)
