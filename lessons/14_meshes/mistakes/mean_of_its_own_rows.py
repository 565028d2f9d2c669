# task 3: sums gradients of means over the data axis: dp times too large a step.
import solution
from solution import *  # noqa: F403


def train_step(blocks, x, targets, rate, dp, tp):
    return solution.train_step(blocks, x, targets, rate * dp.size, dp, tp)
