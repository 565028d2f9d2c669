# task 2: lets interleaved stages hold as little as 1F1B; they hold p + (p - 1)/v microbatches.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    return solution.held(model, replace(layout, chunks=1), batch)
