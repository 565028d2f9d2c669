# task 4: each rank has its own shard of the sum in the end, and not the others': the last all-gather is missing.
import numpy as np
from solution import *  # noqa: F403

from minidist.full.collectives import ring


def hierarchical_all_reduce(buffer, inside, across):
    chunks = np.array_split(buffer, inside.size)
    mine = chunks[inside.rank]
    mine[:] = ring.ring_reduce_scatter(chunks, inside, np.add)
    ring.ring_all_reduce(mine, across, np.add)
