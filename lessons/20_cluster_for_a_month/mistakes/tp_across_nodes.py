# task 3: accepts tensor parallelism across nodes.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    chosen, refused = solution.best(model, machine, layouts, batch)
    return chosen, ["" if reason == "node" else reason for reason in refused]
