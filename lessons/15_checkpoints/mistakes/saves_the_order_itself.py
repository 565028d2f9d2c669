# task 4: saves the run's own order, which the next epoch shuffles in place.
import solution
from solution import *  # noqa: F403


def state_of(run):
    arrays, facts = solution.state_of(run)
    return {**arrays, "order": run.order}, facts
