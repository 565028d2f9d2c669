# task 1: cuts the batch into equal shares and drops the rows that are left over.
from solution import *  # noqa: F403


def local_loss(model, inputs, targets, comm):
    rows = len(inputs) // comm.size
    mine = slice(comm.rank * rows, (comm.rank + 1) * rows)
    return (model(inputs[mine]) - targets[mine]).square().sum() / len(inputs)
