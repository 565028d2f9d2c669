# task 3: counts over all sequences of the batch: what a token gets depends on its neighbours.
import math

import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def kept(choice, positions, time, experts, factor, comm):
    batch, _, k = choice.shape
    asked = torch.zeros(batch, time, experts, dtype=torch.int64)
    asked[:, positions] = torch.nn.functional.one_hot(choice, experts).sum(2)
    all_reduce(asked, comm)
    before = asked.flatten(0, 1).cumsum(0).view(asked.shape) - asked
    return before[:, positions].gather(-1, choice) < batch * math.ceil(factor * k * time / experts)
