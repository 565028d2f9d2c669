# task 2: returns the gradients that lie here after the last block: they are of the right neighbour's keys.
import torch
from solution import *  # noqa: F403
from solution import pass_on

from minidist.full.context.flash import attend_backward


def ring_backward(gradient, query, key, value, output, lse, comm):
    dq, block = torch.zeros_like(query), torch.stack((key, value))
    travelling = torch.zeros_like(block)
    for step in range(comm.size):
        if step:
            block, travelling = pass_on(block, comm), pass_on(travelling, comm)
        if step <= comm.rank:
            found = attend_backward(gradient, query, *block, output, lse, step == 0)
            dq += found[0]
            travelling += torch.stack(found[1:])
    return dq, *travelling
