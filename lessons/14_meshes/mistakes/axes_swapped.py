# task 3: reduces activations along dp and gradients along tp.
import solution
from solution import *  # noqa: F403


def train_step(blocks, x, targets, rate, dp, tp):
    return solution.train_step(blocks, x, targets, rate, tp, dp)
