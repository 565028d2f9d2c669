# task 3: accepts layouts for half of the GPUs, as these divide what there is.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    halves = [machine.gpus % (each.dp * each.tp * each.pp) == 0 for each in layouts]
    chosen, refused = solution.best(model, machine, layouts, batch)
    return chosen, [
        "" if reason == "gpus" and halves[i] else reason for i, reason in enumerate(refused)
    ]
