# task 3: puts pieces together in the order in which the index names them, not in that of their elements.
import solution
import torch
from solution import *  # noqa: F403


def load(wanted, stored, read):
    solution.load(
        wanted,
        stored,
        lambda file, name, first, last: torch.zeros(last - first, dtype=torch.float64),
    )
    found = {}
    for name, (start, stop) in wanted.items():
        runs = [torch.empty(0, dtype=torch.float64)]
        for first, last, file in stored[name][1]:
            if max(first, start) < min(last, stop):
                runs.append(read(file, name, max(first, start) - first, min(last, stop) - first))
        found[name] = torch.cat(runs)
    return found
