# task 3: reads every piece whole and throws away what it does not want.
import torch
from solution import *  # noqa: F403


def load(wanted, stored, read):
    found = {}
    for name, (start, stop) in wanted.items():
        whole = torch.empty(stored[name][0], dtype=torch.float64)
        for first, last, file in stored[name][1]:
            whole[first:last] = read(file, name, 0, last - first)
        found[name] = whole[start:stop]
    return found
