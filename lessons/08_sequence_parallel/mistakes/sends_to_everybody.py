# task 5: sends its block to every rank by itself instead of passing on what came: not along the ring.
import torch
from solution import *  # noqa: F403


def ring_attention(query, key, value, comm):
    time, own = query.shape[2], torch.stack((key, value))
    blocks = {comm.rank: own}
    for step in range(1, comm.size):
        source = (comm.rank - step) % comm.size
        blocks[source] = torch.empty_like(own)
        comm.exchange(own, (comm.rank + step) % comm.size, blocks[source], source)
    keys, values = torch.cat([blocks[rank] for rank in range(comm.rank + 1)], 3)
    scores = query @ keys.transpose(-1, -2) / query.shape[-1] ** 0.5
    future = torch.ones(time, keys.shape[2], dtype=torch.bool).triu(1 + comm.rank * time)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ values
