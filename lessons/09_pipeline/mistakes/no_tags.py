# task 5: sends and receives without tags, so a neighbour that takes the microbatches in another order mixes them up.
from types import SimpleNamespace

from honest import run_step as right
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    untagged = SimpleNamespace(
        rank=comm.rank,
        size=comm.size,
        isend=lambda tensor, to, tag: comm.isend(tensor, to),
        recv=lambda tensor, source, tag: comm.recv(tensor, source),
    )
    return right(words, stage, loss, inputs, targets, untagged)
