# task 3: accepts a tp that does not divide the heads.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    chosen, refused = solution.best(model, machine, layouts, batch)
    return chosen, ["" if reason == "heads" else reason for reason in refused]
