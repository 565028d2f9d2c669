# task 4: each rank looks at itself: only the one that runs out knows it, and it may not be able to speak any more.
from solution import *  # noqa: F403


def out_of_memory(timeline, capacity, comm):
    peak = max((held for _, held in timeline), key=lambda held: sum(held.values()))
    return (comm.rank, max(peak, key=peak.__getitem__)) if sum(peak.values()) > capacity else None
