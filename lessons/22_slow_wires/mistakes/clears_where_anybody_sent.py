# task 1: forgets what it keeps wherever another rank has sent something.
import numpy as np
from solution import *  # noqa: F403

from minidist.full.collectives import all_gather


def sparse_all_reduce(gradient, kept, count, comm):
    kept += gradient
    mine = np.argsort(np.abs(kept))[-count:].astype(np.int32)
    places, values = all_gather(mine, comm), all_gather(kept[mine], comm)
    kept[places] = 0
    gradient[:] = 0
    np.add.at(gradient, places, values)
