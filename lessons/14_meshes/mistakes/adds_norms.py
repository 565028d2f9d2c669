# task 4: adds norms where squares add.
import math

import numpy as np
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def clip(gradients, limit, tp, pp):
    mine = [
        one for one in gradients if (one.cut or tp.rank == 0) and (not one.tied or pp.rank == 0)
    ]
    norm = np.array([math.sqrt(sum(float((one.values**2).sum()) for one in mine))])
    all_reduce(norm, tp)
    all_reduce(norm, pp)
    for one in gradients:
        one.values *= min(1.0, limit / (norm[0] + 1e-6))
    return float(norm[0])
