# task 3: chooses the fastest layout, and looks afterwards whether it fits.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    _, refused = solution.best(model, machine, layouts, batch)
    left = [i for i, reason in enumerate(refused) if reason in ("", "memory")]
    fastest = min(
        left,
        key=lambda i: sum(solution.step(model, machine, layouts[i], batch).values()),
        default=None,
    )
    return fastest, refused
