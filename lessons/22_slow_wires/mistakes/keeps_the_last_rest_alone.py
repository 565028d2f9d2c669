# task 1: keeps the rest of this step alone, not what has waited longer.
import numpy as np
from solution import *  # noqa: F403

from minidist.full.collectives import all_gather


def sparse_all_reduce(gradient, kept, count, comm):
    new = gradient.copy()
    kept += gradient
    mine = np.argsort(np.abs(kept))[-count:].astype(np.int32)
    places, values = all_gather(mine, comm), all_gather(kept[mine], comm)
    kept[:] = new
    kept[mine] = 0
    gradient[:] = 0
    np.add.at(gradient, places, values)
