# task 3: opens a bucket when the last one is closed, also when no parameter is left for it.
from solution import *  # noqa: F403


def assign_buckets(parameters, limit):
    buckets, held = [[]], 0
    for parameter in reversed(parameters):
        buckets[-1].append(parameter)
        held += parameter.nbytes
        if held >= limit:
            buckets.append([])
            held = 0
    return buckets
