# task 3: positions count from 0 on every rank, as if its tokens were a sequence of their own.
import torch
from solution import *  # noqa: F403
from solution import positions as right


def positions(order, ranks, rank, time):
    expected = right(order, ranks, rank, time)
    return torch.arange(len(expected))
