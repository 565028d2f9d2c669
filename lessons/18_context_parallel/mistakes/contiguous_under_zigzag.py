# task 3: positions are neighbours in every order, though in zigzag order a rank's tokens are two chunks.
import torch
from solution import *  # noqa: F403
from solution import positions as right


def positions(order, ranks, rank, time):
    expected = right(order, ranks, rank, time)
    return torch.arange(time).chunk(ranks)[rank] if len(expected) else expected
