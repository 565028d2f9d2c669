# task 5: counts half an interval and a restart for each failure: the first-order estimate, not the expectation.
from solution import *  # noqa: F403


def shares(compute_seconds, write_seconds, mtbf_seconds, restart_seconds):
    both = compute_seconds + write_seconds
    whole = both * (1 + (both / 2 + restart_seconds) / mtbf_seconds)
    training, writing = compute_seconds / whole, write_seconds / whole
    return training, writing, 1 - training - writing
