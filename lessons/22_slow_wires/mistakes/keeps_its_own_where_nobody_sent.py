# task 1: leaves its own gradient in place where nobody has sent anything.
import numpy as np
from solution import *  # noqa: F403

from minidist.full.collectives import all_gather


def sparse_all_reduce(gradient, kept, count, comm):
    kept += gradient
    mine = np.argsort(np.abs(kept))[-count:].astype(np.int32)
    places, values = all_gather(mine, comm), all_gather(kept[mine], comm)
    kept[mine] = 0
    gradient[places] = 0
    np.add.at(gradient, places, values)
