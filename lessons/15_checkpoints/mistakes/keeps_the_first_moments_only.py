# task 4: forgets Adam's second moments, which the new run has of its own.
import solution
from solution import *  # noqa: F403


def restore(run, arrays, facts):
    square = {name: array.copy() for name, array in run.square.items()}
    solution.restore(run, arrays, facts)
    for name, array in square.items():
        run.square[name] = array
