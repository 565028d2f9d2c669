# task 1: counts Adam's two moments and forgets the master copy of the parameters: 8 bytes instead of 12.
from solution import *  # noqa: F403


def model_states(parameters, ranks, stage):
    each = [(2, 3), (2, 2), (8, 1)]
    return tuple(parameters * bytes / (ranks if stage >= first else 1) for bytes, first in each)
