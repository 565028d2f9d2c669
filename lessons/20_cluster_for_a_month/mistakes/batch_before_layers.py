# task 3: asks whether the batch can be divided before it asks whether the layers can.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    chosen, refused = solution.best(model, machine, layouts, batch)
    uneven = [batch % (each.dp * each.microbatch) != 0 for each in layouts]
    return chosen, [
        "batch" if reason == "layers" and uneven[i] else reason for i, reason in enumerate(refused)
    ]
