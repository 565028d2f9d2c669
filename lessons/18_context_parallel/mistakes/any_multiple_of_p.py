# task 3: asks only whether P divides the tokens, and cuts chunks of different lengths in zigzag order.
import torch
from solution import *  # noqa: F403
from solution import positions as right


def positions(order, ranks, rank, time):
    if order != "zigzag" or time % ranks or time % (2 * ranks) == 0:
        return right(order, ranks, rank, time)
    chunks = torch.arange(time).tensor_split(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))
