# task 4: all-reduces inside the node where a reduce-scatter is enough: twice the messages before anything crosses.
import numpy as np
from solution import *  # noqa: F403

from minidist.full.collectives import ring


def hierarchical_all_reduce(buffer, inside, across):
    ring.ring_all_reduce(buffer, inside, np.add)
    chunks = np.array_split(buffer, inside.size)
    ring.ring_all_reduce(chunks[inside.rank], across, np.add)
    ring.ring_all_gather(chunks, inside)
