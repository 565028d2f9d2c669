# task 1: gives every stage as many layers as the others, whatever they cost.
import numpy as np
from solution import *  # noqa: F403


def cut_layers(costs, stages):
    return [range(part[0], part[-1] + 1) for part in np.array_split(np.arange(len(costs)), stages)]
