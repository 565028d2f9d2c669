# task 3: looks only whether the wanted elements are there; holes elsewhere go unnoticed.
import torch
from solution import *  # noqa: F403


def load(wanted, stored, read):
    found = {}
    for name, (start, stop) in wanted.items():
        places = stored.get(name, (0, []))[1]
        if any(
            sum(first <= at < last for first, last, _ in places) != 1 for at in range(start, stop)
        ):
            raise ValueError(f"{name}: elements are missing, or there twice")
    for name, (start, stop) in wanted.items():
        runs = [torch.empty(0, dtype=torch.float64)]
        for first, last, file in sorted(stored[name][1]):
            if max(first, start) < min(last, stop):
                runs.append(read(file, name, max(first, start) - first, min(last, stop) - first))
        found[name] = torch.cat(runs)
    return found
