# task 1: gathers along the first axis, which is the batch, instead of along the tokens.
from solution import *  # noqa: F403
from solution import adjoint


def gather_tokens(x, comm):
    rows = adjoint.all_gather(x, comm, 0, x.shape[0] * comm.size)
    return rows.reshape(x.shape[0], -1, x.shape[2])
