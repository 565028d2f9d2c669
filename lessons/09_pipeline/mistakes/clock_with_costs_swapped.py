# task 2: takes the time of B for F and that of F for B, which shows only where they do not count equally often.
import solution
from solution import *  # noqa: F403


def step_length(rows, forward, backward):
    return solution.step_length(rows, backward, forward)
