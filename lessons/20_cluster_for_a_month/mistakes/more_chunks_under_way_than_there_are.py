# task 2: holds p + (p - 1)/v microbatches with chunks also where a replica has fewer.
import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    many = batch if layout.chunks == 1 else 1000 * layout.dp * layout.microbatch
    return solution.held(model, layout, many)
