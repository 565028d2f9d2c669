# task 3: leaves out the last batch of an epoch if it is shorter.
import solution
from solution import *  # noqa: F403


def microbatches(order, step, batch, largest, ranks, rank):
    order_of, full = order, len(order(0)) // batch * batch
    return solution.microbatches(
        lambda epoch: order_of(epoch)[:full], step, batch, largest, ranks, rank
    )
