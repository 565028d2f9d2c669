# task 2: takes the ranks for stuck only if none of them is done, so one that waits for what nobody does goes unseen.
from solution import *  # noqa: F403
from solution import step_length as right


def step_length(rows, forward, backward):
    try:
        return right(rows, forward, backward)
    except ValueError:
        common = set(rows[0]).intersection(*rows[1:])
        runnable = [[word for word in row if word in common] for row in rows]
        if any(kept == list(row) for kept, row in zip(runnable, rows, strict=True)):
            return right(runnable, forward, backward)
        raise
