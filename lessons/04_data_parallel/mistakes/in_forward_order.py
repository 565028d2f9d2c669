# task 3: deals parameters out from the first layer on, so no bucket is complete before backward is nearly over.
from solution import *  # noqa: F403

from minidist.full.ddp.buckets import partition


def assign_buckets(parameters, limit):
    return partition(parameters, limit, limit)
