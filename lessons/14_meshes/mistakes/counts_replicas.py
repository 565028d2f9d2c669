# task 4: adds the squares of all ranks, so that what several hold is counted by each of them.
import solution
from solution import *  # noqa: F403


def clip(gradients, limit, tp, pp):
    for gradient in gradients:
        gradient.cut, gradient.tied = True, False
    return solution.clip(gradients, limit, tp, pp)
