# task 1: the token is no copy, so it arrives in the caller's array.
import solution
from solution import *  # noqa: F403


def pass_token(own, comm):
    own[:] = solution.pass_token(own, comm)
    return own
