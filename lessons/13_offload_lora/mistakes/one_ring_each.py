# task 2: reduces each gradient by itself: twice the messages, with so little in each that latency is all.
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def reduce_adapters(model, comm):
    for parameter in model.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad, comm, algorithm="ring")
