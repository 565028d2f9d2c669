# task 4: one leader of each node sends everything across, while the network ports of the others are idle.
from operator import iadd

import numpy as np
from solution import *  # noqa: F403

from minidist import ring
from minidist.full.collectives import tree


def hierarchical_all_reduce(buffer, inside, across):
    tree.reduce(buffer, inside, 0, np.add)
    if inside.rank == 0:
        ring.ring_all_reduce(np.array_split(buffer, across.size), across, iadd)
    tree.broadcast(buffer, inside, 0)
