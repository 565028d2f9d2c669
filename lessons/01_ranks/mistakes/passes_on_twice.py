# task 1: rank 0 sends the token on once more when it has come home.
import numpy as np
import solution
from solution import *  # noqa: F403


def pass_token(own, comm):
    token = solution.pass_token(own, comm)
    if comm.rank == 0 and comm.size > 1:
        comm.send(token, 1)
    elif comm.rank == 1:
        comm.recv(np.empty_like(token), 0)
    return token
