# task 5: never waits for what it sends: the tensor may be overwritten while it is still being read.
from types import SimpleNamespace

from honest import run_step as right
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    def isend(tensor, to, tag):
        comm.isend(tensor, to, tag)
        return SimpleNamespace(wait=lambda: None)

    careless = SimpleNamespace(rank=comm.rank, size=comm.size, recv=comm.recv, isend=isend)
    return right(words, stage, loss, inputs, targets, careless)
