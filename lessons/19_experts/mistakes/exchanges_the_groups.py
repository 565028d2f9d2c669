# task 4: the ranks that share the experts are far apart, and those that have the same are neighbours.
from solution import *  # noqa: F403
from solution import groups as right


def groups(comm, ep):
    share, copies = right(comm, comm.size // ep)
    return copies, share
