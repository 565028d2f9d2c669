# task 3: looks only whether the lengths add up, so that a gap and an overlap cancel.
import torch
from solution import *  # noqa: F403


def load(wanted, stored, read):
    found = {}
    for name in wanted:
        if (
            name not in stored
            or sum(last - first for first, last, _ in stored[name][1]) != stored[name][0]
        ):
            raise ValueError(f"{name}: elements are missing, or there twice")
    for name, (start, stop) in wanted.items():
        runs = [torch.empty(0, dtype=torch.float64)]
        for first, last, file in sorted(stored[name][1]):
            if max(first, start) < min(last, stop):
                runs.append(read(file, name, max(first, start) - first, min(last, stop) - first))
        found[name] = torch.cat(runs)
    return found
