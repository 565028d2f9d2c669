# task 3: takes capacity and counts from the tokens of this rank: the layout decides what is dropped.
import math

import torch
from solution import *  # noqa: F403


def kept(choice, positions, time, experts, factor, comm):
    _, own, k = choice.shape
    chosen = torch.nn.functional.one_hot(choice, experts).sum(2)
    earlier = chosen.cumsum(1) - chosen
    return earlier.gather(-1, choice) < math.ceil(factor * k * own / experts)
