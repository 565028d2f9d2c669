# task 1: splits by the coordinate on the axis: ranks of one coordinate meet, which are those of the other axes.
import solution
from solution import *  # noqa: F403


def communicator(axis, comm, sizes):
    return comm.split(solution.coordinates(comm.rank, sizes)[axis])
