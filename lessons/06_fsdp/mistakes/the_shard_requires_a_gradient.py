# task 1: the shard requires a gradient, so autograd follows every change of it and every gathering.
import solution
from solution import *  # noqa: F403


def cut(parameters, comm):
    shard, held = solution.cut(parameters, comm)
    return shard.requires_grad_(), held
