# task 2: divides the whole model's bias in place before it is cut: each rank takes another part of it.
import solution
from solution import *  # noqa: F403


def mlp_slices(whole, rank, ranks):
    mine = solution.mlp_slices(whole, rank, ranks)
    whole["down.bias"] /= ranks
    return mine
