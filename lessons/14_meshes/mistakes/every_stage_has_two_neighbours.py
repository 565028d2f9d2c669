# task 2: lets the first and the last stage send both ways along the pipeline.
import solution
from solution import *  # noqa: F403


def bytes_per_step(sizes, stage, **model):
    found = solution.bytes_per_step(sizes, stage, **model)
    both = model["microbatches"] * model["tokens"] * model["hidden"] * model["itemsize"]
    return {**found, "pp": 2 * both if sizes["pp"] > 1 else 0}
