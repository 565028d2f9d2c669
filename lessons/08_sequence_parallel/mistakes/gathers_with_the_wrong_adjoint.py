# task 1: backward of the gather takes this rank's tokens of its own gradient, and forgets the other ranks' terms.
from solution import *  # noqa: F403
from solution import adjoint


def gather_tokens(x, comm):
    return adjoint.gather_from(x, comm, 1, x.shape[1] * comm.size)
