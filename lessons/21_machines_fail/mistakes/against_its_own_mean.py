# task 4: compares a rank with its own mean, so that one which is always slow is never named.
import numpy as np
from solution import *  # noqa: F403


def straggler(seconds, rows, stages):
    lasting = np.median(seconds / seconds.mean(axis=0), axis=0)
    lasting = np.where(np.array(rows) > 0, lasting, 1.0)
    worst = int(np.argmax(lasting))
    return worst if lasting[worst] >= 1.3 else None
