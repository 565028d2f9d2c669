# task 5: waits for each send before it begins the next: stuck if the neighbour first wants another microbatch.
from types import SimpleNamespace

from honest import run_step as right
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    before = {}

    def isend(tensor, to, tag):
        if to in before:
            before[to].wait()
        before[to] = comm.isend(tensor, to, tag)
        return before[to]

    one_by_one = SimpleNamespace(rank=comm.rank, size=comm.size, recv=comm.recv, isend=isend)
    return right(words, stage, loss, inputs, targets, one_by_one)
