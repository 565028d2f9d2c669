# task 3: chooses the layout that holds the fewest bytes; what fits, fits, and then time counts.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    _, refused = solution.best(model, machine, layouts, batch)
    left = [i for i, reason in enumerate(refused) if not reason]
    return min(
        left, key=lambda i: sum(solution.held(model, layouts[i], batch).values()), default=None
    ), refused
