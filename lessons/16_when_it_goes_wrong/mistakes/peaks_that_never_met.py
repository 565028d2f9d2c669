# task 4: adds up each category's own peak, although they were never held at the same moment.
import solution
from solution import *  # noqa: F403


def out_of_memory(timeline, capacity, comm):
    peaks = {name: max(held[name] for _, held in timeline) for name in timeline[0][1]}
    return solution.out_of_memory([(0.0, peaks)], capacity, comm)
