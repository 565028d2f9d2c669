# task 4: puts scaled copies into the gradients; the arrays that were given stay as they are.
import solution
from solution import *  # noqa: F403


def clip(gradients, limit, tp, pp):
    for gradient in gradients:
        gradient.values = gradient.values.copy()
    return solution.clip(gradients, limit, tp, pp)
