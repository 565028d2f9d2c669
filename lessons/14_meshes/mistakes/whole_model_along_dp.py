# task 2: reduces the gradients of the whole model along dp, although tp and pp leave a rank its part of it.
import solution
from solution import *  # noqa: F403


def bytes_per_step(sizes, stage, **model):
    whole = solution.bytes_per_step({**sizes, "pp": 1, "tp": 1}, 0, **model)
    return {**solution.bytes_per_step(sizes, stage, **model), "dp": whole["dp"]}
