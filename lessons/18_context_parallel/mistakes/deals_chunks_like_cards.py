# task 3: deals the 2 P chunks like cards: rank r has chunks r and r + P, and the last rank still the most to compute.
import torch
from solution import *  # noqa: F403
from solution import positions as right


def positions(order, ranks, rank, time):
    expected = right(order, ranks, rank, time)
    if order != "zigzag":
        return expected
    chunks = torch.arange(time).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[rank + ranks]))
