# task 4: compares a rank with its own first step, so that one which is always slow is never named.
import numpy as np
from solution import *  # noqa: F403


def straggler(seconds, rows, stages):
    paces = seconds / np.maximum(1, rows)
    lasting = np.where(np.array(rows) > 0, np.median(paces / paces[0], axis=0), 1.0)
    worst = int(np.argmax(lasting))
    return worst if lasting[worst] >= 1.3 else None
