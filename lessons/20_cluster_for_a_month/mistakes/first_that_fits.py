# task 3: takes the first layout that fits.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    _, refused = solution.best(model, machine, layouts, batch)
    return next((i for i, reason in enumerate(refused) if not reason), None), refused
