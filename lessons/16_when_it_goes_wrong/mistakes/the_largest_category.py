# task 4: blames what is largest, which on every rank are the parameters, instead of what is unusual.
import solution
from solution import *  # noqa: F403


def out_of_memory(timeline, capacity, comm):
    found = solution.out_of_memory(timeline, capacity, comm)
    peak = max((held for _, held in timeline), key=lambda held: sum(held.values()))
    return found and (found[0], max(peak, key=peak.__getitem__))
