# task 5: returns the last microbatch's loss instead of the mean of all.
import solution
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    losses = [0.0]

    def noted(output, target):
        losses.append(loss(output, target))
        return losses[-1]

    solution.run_step(words, stage, noted, inputs, targets, comm)
    return float(losses[-1])
