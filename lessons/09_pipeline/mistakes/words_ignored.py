# task 5: does all forwards and then all backwards, whatever the schedule says.
import solution
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    ordered = [f"{kind}{m}" for kind in "FB" for m in range(len(inputs))]
    return solution.run_step(ordered, stage, loss, inputs, targets, comm)
