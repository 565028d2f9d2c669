# task 3: accepts layouts that do not use all GPUs, or use more than there are.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    chosen, refused = solution.best(model, machine, layouts, batch)
    return chosen, ["" if reason == "gpus" else reason for reason in refused]
