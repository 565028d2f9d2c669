# task 2: reduces gradients in every microbatch, where once a step is enough.
import solution
from solution import *  # noqa: F403


def bytes_per_step(sizes, stage, **model):
    found = solution.bytes_per_step(sizes, stage, **model)
    return {**found, "dp": found["dp"] * model["microbatches"]}
