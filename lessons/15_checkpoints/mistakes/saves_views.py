# task 4: saves the arrays themselves, which training changes before they are written.
import solution
from solution import *  # noqa: F403


def state_of(run):
    arrays, facts = solution.state_of(run)
    return {**arrays, "weights/w": run.weights["w"]}, facts
