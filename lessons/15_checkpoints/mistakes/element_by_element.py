# task 3: reads one element at a time.
import solution
import torch
from solution import *  # noqa: F403


def load(wanted, stored, read):
    def one_by_one(file, name, first, last):
        return torch.cat([read(file, name, at, at + 1) for at in range(first, last)])

    return solution.load(wanted, stored, one_by_one)
