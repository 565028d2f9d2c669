# task 5: writes all outputs into one tensor before it sends them, while earlier sends may still read it.
from types import SimpleNamespace

from honest import run_step as right
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    buffers = {}

    def isend(tensor, to, tag):
        buffer = buffers.setdefault(to, tensor.clone())
        buffer.copy_(tensor)
        return comm.isend(buffer, to, tag)

    careless = SimpleNamespace(rank=comm.rank, size=comm.size, recv=comm.recv, isend=isend)
    return right(words, stage, loss, inputs, targets, careless)
