# task 1: one rank alone returns `own` itself: whoever changes the one changes the other.
import solution
from solution import *  # noqa: F403


def pass_token(own, comm):
    return own if comm.size == 1 else solution.pass_token(own, comm)
