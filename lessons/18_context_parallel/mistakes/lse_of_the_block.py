# task 2: backward takes the block's own lse and output, as if its keys were all there are.
import torch
from solution import *  # noqa: F403
from solution import pass_on

from minidist.full.context.flash import attend, attend_backward


def ring_backward(gradient, query, key, value, output, lse, comm):
    dq, block = torch.zeros_like(query), torch.stack((key, value))
    travelling = torch.zeros_like(block)
    for step in range(comm.size):
        if step:
            block, travelling = pass_on(block, comm), pass_on(travelling, comm)
        if step <= comm.rank:
            found = attend(query, *block, step == 0)
            found = attend_backward(gradient, query, *block, *found, step == 0)
            dq += found[0]
            travelling += torch.stack(found[1:])
    return dq, *pass_on(travelling, comm)
