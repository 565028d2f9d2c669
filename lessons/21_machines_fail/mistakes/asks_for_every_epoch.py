# task 3: asks for the orders of all epochs up to the step's own, to find the step in all of them.
import solution
from solution import *  # noqa: F403


def microbatches(order, step, batch, largest, ranks, rank):
    length = len(order(0))
    orders = [order(epoch) for epoch in range(step * batch // length + 1)]
    return solution.microbatches(
        lambda epoch: orders[epoch] if epoch < len(orders) else order(epoch),
        step,
        batch,
        largest,
        ranks,
        rank,
    )
