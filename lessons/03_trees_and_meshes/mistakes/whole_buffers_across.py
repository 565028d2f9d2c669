# task 4: sums inside the node, then every rank sends the whole buffer across: G times the bytes between nodes.
from operator import iadd

import numpy as np
from solution import *  # noqa: F403

from minidist import ring


def hierarchical_all_reduce(buffer, inside, across):
    ring.ring_all_reduce(np.array_split(buffer, inside.size), inside, iadd)
    ring.ring_all_reduce(np.array_split(buffer, across.size), across, iadd)
