# task 3: does not look whether the pieces have every element: what is missing is whatever was in memory.
import torch
from solution import *  # noqa: F403


def load(wanted, stored, read):
    found = {}
    for name, (start, stop) in wanted.items():
        found[name] = torch.zeros(stop - start, dtype=torch.float64)
        for first, last, file in stored[name][1]:
            low, high = max(first, start), min(last, stop)
            if low < high:
                found[name][low - start : high - start] = read(
                    file, name, low - first, high - first
                )
    return found
