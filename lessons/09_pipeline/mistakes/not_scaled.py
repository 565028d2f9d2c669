# task 5: the gradients of the sum over the microbatches, not of the mean: m times too large.
import solution
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    total = solution.run_step(
        words, stage, lambda y, t: loss(y, t) * len(inputs), inputs, targets, comm
    )
    return total / len(inputs)
