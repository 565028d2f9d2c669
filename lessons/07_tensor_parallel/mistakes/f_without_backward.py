# task 1: f is the identity in both directions: each rank keeps its own term of the gradient.
from solution import *  # noqa: F403


def copy_to(x, comm):
    return x.view_as(x)
