# task 4: all-reduces inside the node where a reduce-scatter is enough: twice the messages before anything crosses.
from operator import iadd

import numpy as np
from solution import *  # noqa: F403

from minidist import ring


def hierarchical_all_reduce(buffer, inside, across):
    ring.ring_all_reduce(np.array_split(buffer, inside.size), inside, iadd)
    chunks = np.array_split(buffer, inside.size)
    ring.ring_all_reduce(np.array_split(chunks[inside.rank], across.size), across, iadd)
    ring.ring_all_gather(chunks, inside)
