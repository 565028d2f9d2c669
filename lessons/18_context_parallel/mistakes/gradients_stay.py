# task 2: adds up the gradients of all blocks that come by on the rank that computes them, and sends none home.
import torch
from solution import *  # noqa: F403
from solution import pass_on

from minidist.full.context.flash import attend_backward


def ring_backward(gradient, query, key, value, output, lse, comm):
    dq, block = torch.zeros_like(query), torch.stack((key, value))
    total = torch.zeros_like(block)
    for step in range(comm.size):
        if step:
            block = pass_on(block, comm)
        if step <= comm.rank:
            found = attend_backward(gradient, query, *block, output, lse, step == 0)
            dq += found[0]
            total += torch.stack(found[1:])
    return dq, *total
