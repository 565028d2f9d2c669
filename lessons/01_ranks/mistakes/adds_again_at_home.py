# task 1: rank 0 adds its own a second time when the token comes home.
import solution
from solution import *  # noqa: F403


def pass_token(own, comm):
    token = solution.pass_token(own, comm)
    return token + own if comm.rank == 0 else token
