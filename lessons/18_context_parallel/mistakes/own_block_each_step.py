# task 2: sends its own block in every step, not the one that came to it.
import torch
from solution import *  # noqa: F403
from solution import meet


def ring_forward(query, key, value, comm):
    output = torch.zeros(query.shape, dtype=query.dtype)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=query.dtype)
    own = torch.stack([key, value])
    block, incoming = own, torch.empty_like(own)
    for step in range(comm.size):
        if step > 0:
            comm.exchange(own, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
            block = incoming
        if step <= comm.rank:
            meet(query, output, lse, block[0], block[1], step == 0)
    return output, lse
