# task 3: counts microbatches by the rank's own share: ranks disagree, and one waits for ever.
import numpy as np
from solution import *  # noqa: F403


def microbatches(order, step, batch, largest, ranks, rank):
    epoch, number = divmod(step, -(-len(order(0)) // batch))
    whole = order(epoch)[number * batch : (number + 1) * batch]
    mine = np.array_split(whole, ranks)[rank]
    count = max(1, -(-len(mine) // largest))
    parts = np.array_split(mine, count)
    return [(part, len(part) / len(whole)) for part in parts]
