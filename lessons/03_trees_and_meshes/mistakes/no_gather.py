# task 4: each rank has its own shard of the sum in the end, and not the others': the last all-gather is missing.
from operator import iadd

import numpy as np
from solution import *  # noqa: F403

from minidist import ring


def hierarchical_all_reduce(buffer, inside, across):
    chunks = np.array_split(buffer, inside.size)
    mine = chunks[inside.rank]
    mine[:] = ring.ring_reduce_scatter(chunks, inside, iadd)
    ring.ring_all_reduce(np.array_split(mine, across.size), across, iadd)
