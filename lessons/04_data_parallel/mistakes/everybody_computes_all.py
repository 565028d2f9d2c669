# task 1: every rank computes on the whole batch, so more ranks are no faster.
from solution import *  # noqa: F403


def local_loss(model, inputs, targets, comm):
    return (model(inputs) - targets).square().mean(0).sum() / comm.size
