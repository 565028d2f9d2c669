# task 3: serves all tokens' first choices before the second ones, whatever the positions are.
import math

import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def kept(choice, positions, time, experts, factor, comm):
    sequences, _, k = choice.shape
    capacity = math.ceil(factor * k * time / experts)
    asked = torch.zeros(sequences, k, time, experts, dtype=torch.int64)
    for sequence in range(sequences):
        for j in range(k):
            asked[sequence, j, positions, choice[sequence, :, j]] = 1
    all_reduce(asked, comm)
    before = asked.flatten(1, 2).cumsum(1).view_as(asked) - asked
    room = before[:, :, positions].transpose(1, 2) < capacity  # [B, T', k, E]
    return room.gather(3, choice[..., None])[..., 0]
