# task 1: sends the whole gradient, with zeros where nothing is to be sent.
import numpy as np
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def sparse_all_reduce(gradient, kept, count, comm):
    kept += gradient
    mine = np.argsort(np.abs(kept))[-count:]
    gradient[:] = 0
    gradient[mine] = kept[mine]
    kept[mine] = 0
    all_reduce(gradient, comm)
