# task 1: divides parameters and gradients from stage 1 on, which is stage 3.
from solution import *  # noqa: F403


def model_states(parameters, ranks, stage):
    return tuple(parameters * bytes / (ranks if stage else 1) for bytes in (2, 2, 12))
