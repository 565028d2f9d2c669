# task 5: the ring of lesson 02 in mind: gradients go once around, to the rank that has no use for them as well.
import numpy as np
import solution
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    total = solution.run_step(words, stage, loss, inputs, targets, comm)
    if comm.size > 1:
        message = np.zeros(inputs[0].numel())
        comm.exchange(
            message,
            (comm.rank + 1) % comm.size,
            np.empty_like(message),
            (comm.rank - 1) % comm.size,
        )
    return total
