# task 3: accepts a dp that does not divide the batch.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    chosen, refused = solution.best(model, machine, layouts, batch)
    return chosen, ["" if reason == "batch" else reason for reason in refused]
