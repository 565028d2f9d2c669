# task 3: deals samples out like cards, as torch's DistributedSampler does, not in contiguous shares.
import numpy as np
from solution import *  # noqa: F403


def microbatches(order, step, batch, largest, ranks, rank):
    epoch, number = divmod(step, -(-len(order(0)) // batch))
    whole = order(epoch)[number * batch : (number + 1) * batch]
    mine = whole[rank::ranks]
    count = -(-len(np.array_split(whole, ranks)[0]) // largest)
    parts = np.array_split(mine, count)
    return [(part, len(part) / len(whole)) for part in parts]
