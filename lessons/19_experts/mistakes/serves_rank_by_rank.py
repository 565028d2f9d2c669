# task 3: serves tokens in the order in which they lie, rank by rank, not in that of their positions.
import math

import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def kept(choice, positions, time, experts, factor, comm):
    batch, own, k = choice.shape
    mine = slice(comm.rank * own, (comm.rank + 1) * own)
    asked = torch.zeros(batch, time, experts, dtype=torch.int64)
    asked[:, mine] = torch.nn.functional.one_hot(choice, experts).sum(2)
    all_reduce(asked, comm)
    before = asked.cumsum(1) - asked
    return before[:, mine].gather(-1, choice) < math.ceil(factor * k * time / experts)
