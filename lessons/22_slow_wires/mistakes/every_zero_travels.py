# task 1: sends all that is not smaller than element number k: all zeros, where fewer than k are others.
import numpy as np
from solution import *  # noqa: F403

from minidist.full.collectives import all_gather


def sparse_all_reduce(gradient, kept, count, comm):
    kept += gradient
    least = np.sort(np.abs(kept))[-count]
    mine = np.flatnonzero(np.abs(kept) >= least).astype(np.int32)
    places, values = all_gather(mine, comm), all_gather(kept[mine], comm)
    kept[mine] = 0
    gradient[:] = 0
    np.add.at(gradient, places, values)
