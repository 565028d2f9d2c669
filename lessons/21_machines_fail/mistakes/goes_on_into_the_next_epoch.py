# task 3: fills the last batch of an epoch with samples of the next one.
import numpy as np
from solution import *  # noqa: F403


def microbatches(order, step, batch, largest, ranks, rank):
    size = len(order(0))
    epoch, start = divmod(step * batch, size)
    more = order(epoch + 1) if start + batch > size else np.empty(0, np.int64)
    whole = np.concatenate([order(epoch)[start:], more])[:batch]
    count = -(-len(np.array_split(whole, ranks)[0]) // largest)
    parts = np.array_split(np.array_split(whole, ranks)[rank], count)
    return [(part, len(part) / len(whole)) for part in parts]
