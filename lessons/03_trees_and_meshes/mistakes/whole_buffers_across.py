# task 4: sums inside the node, then every rank sends the whole buffer across: G times the bytes between nodes.
import numpy as np
from solution import *  # noqa: F403

from minidist.full.collectives import ring


def hierarchical_all_reduce(buffer, inside, across):
    ring.ring_all_reduce(buffer, inside, np.add)
    ring.ring_all_reduce(buffer, across, np.add)
