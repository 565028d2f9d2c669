# task 1: reduces everything on every rank and then throws most of it away: twice the bytes of a reduce-scatter.
from solution import *  # noqa: F403
from solution import adjoint


def scatter_tokens(x, comm):
    return adjoint.scatter_to(adjoint.reduce_from(x, comm), comm, 1)
