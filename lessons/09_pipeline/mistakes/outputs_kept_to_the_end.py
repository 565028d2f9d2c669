# task 5: keeps every output that it sends until the step is over: one activation a microbatch.
from types import SimpleNamespace

from honest import run_step as right
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    kept = []

    def isend(tensor, to, tag):
        kept.append(tensor)
        return comm.isend(tensor, to, tag)

    hoarding = SimpleNamespace(rank=comm.rank, size=comm.size, recv=comm.recv, isend=isend)
    return right(words, stage, loss, inputs, targets, hoarding)
