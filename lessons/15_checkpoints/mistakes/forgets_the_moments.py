# task 4: saves the weights and no state of the optimizer.
import solution
from solution import *  # noqa: F403


def restore(run, arrays, facts):
    solution.restore(run, {**arrays, "mean/w": 0 * arrays["mean/w"]}, facts)
