# task 1: averages over its own rows and divides by the ranks: the mean of means, wrong where shares are unequal.
from solution import *  # noqa: F403


def local_loss(model, inputs, targets, comm):
    some, wanted = (
        inputs.tensor_split(comm.size)[comm.rank],
        targets.tensor_split(comm.size)[comm.rank],
    )
    return (model(some) - wanted).square().sum() / max(1, len(some)) / comm.size
