# task 1: splits for all axes in each call, and returns one of the communicators.
import solution
from solution import *  # noqa: F403


def communicator(axis, comm, sizes):
    return {each: solution.communicator(each, comm, sizes) for each in sizes}[axis]
