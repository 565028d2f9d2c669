# task 3: divides by `batch` also where the last one of an epoch is shorter.
import numpy as np
from solution import *  # noqa: F403


def microbatches(order, step, batch, largest, ranks, rank):
    epoch, number = divmod(step, -(-len(order(0)) // batch))
    whole = order(epoch)[number * batch : (number + 1) * batch]
    mine = np.array_split(whole, ranks)[rank]
    count = -(-len(np.array_split(whole, ranks)[0]) // largest)
    parts = np.array_split(mine, count)
    return [(part, len(part) / batch) for part in parts]
