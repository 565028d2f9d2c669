# task 2: gives every rank those parameters of rank 0 that need a gradient: frozen ones stay different.
from solution import *  # noqa: F403

from minidist.full.collectives import broadcast


def start_equal(model, comm):
    for parameter in model.parameters():
        if parameter.requires_grad:
            broadcast(parameter.detach(), comm, algorithm="tree")
