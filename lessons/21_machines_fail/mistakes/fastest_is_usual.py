# task 4: takes the fastest rank as usual: one quick machine makes all others slow.
import numpy as np
from solution import *  # noqa: F403


def straggler(seconds, rows, stages):
    paces = seconds / np.maximum(1, rows)
    scores = np.ones_like(paces)
    for rank, stage in enumerate(stages):
        peers = [r for r, other in enumerate(stages) if other == stage and rows[r]]
        if rows[rank]:
            scores[:, rank] = paces[:, rank] / np.min(paces[:, peers], axis=1)
    lasting = np.median(scores, axis=0)
    worst = int(np.argmax(lasting))
    return worst if lasting[worst] >= 1.3 else None
