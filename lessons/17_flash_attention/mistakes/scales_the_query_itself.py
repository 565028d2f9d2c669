# task 3: divides the query by the root of d in place, so the caller, and backward, has another query.
import solution
from solution import *  # noqa: F403


def flash_forward(query, key, value, causal):
    root = query.shape[-1] ** 0.5
    query /= root
    return solution.flash_forward(query * root, key, value, causal)
