# task 4: sends the gradients themselves to find their norm.
import numpy as np
import solution
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def clip(gradients, limit, tp, pp):
    whole = np.concatenate([one.values.ravel() for one in gradients])
    all_reduce(whole, tp)
    all_reduce(whole, pp)
    return solution.clip(gradients, limit, tp, pp)
