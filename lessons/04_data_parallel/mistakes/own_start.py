# task 2: leaves every rank the parameters that it drew itself: equal gradients do not make them equal any more.
from solution import *  # noqa: F403


def start_equal(model, comm):
    pass
