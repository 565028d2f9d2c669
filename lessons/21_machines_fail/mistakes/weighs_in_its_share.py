# task 3: weighs a microbatch in its rank's share, so the weights add up to the number of ranks.
import numpy as np
from solution import *  # noqa: F403


def microbatches(order, step, batch, largest, ranks, rank):
    epoch, number = divmod(step, -(-len(order(0)) // batch))
    whole = order(epoch)[number * batch : (number + 1) * batch]
    mine = np.array_split(whole, ranks)[rank]
    count = -(-len(np.array_split(whole, ranks)[0]) // largest)
    parts = np.array_split(mine, count)
    return [(part, len(part) / max(1, len(mine))) for part in parts]
