# task 2: in backward computes the gradients of later ranks' blocks, too, and throws them away.
import torch
from solution import *  # noqa: F403

from minidist.full.context.flash import attend_backward


def ring_backward(gradient, query, key, value, output, lse, comm):
    def passed(x):
        arriving = torch.empty_like(x)
        comm.exchange(x, (comm.rank + 1) % comm.size, arriving, (comm.rank - 1) % comm.size)
        return arriving

    mine, block = torch.zeros_like(query), torch.stack((key, value))
    total = torch.zeros_like(block)
    for step in range(comm.size):
        if step:
            block, total = passed(block), passed(total)
        found = attend_backward(gradient, query, *block, output, lse, step == 0)
        if step <= comm.rank:
            mine += found[0]
            total += torch.stack(found[1:])
    if comm.size > 1:
        total = passed(total)
    return mine, *total
