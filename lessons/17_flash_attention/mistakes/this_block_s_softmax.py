# task 4: computes output and lse of the given keys anew: those of all keys are given, the block has others.
import solution
from solution import *  # noqa: F403


def flash_backward(gradient, query, key, value, output, lse, causal):
    own = solution.flash_forward(query, key, value, causal)
    return solution.flash_backward(gradient, query, key, value, *own, causal)
