# task 5: counts every block that comes by, those of later ranks too.
import torch
from solution import *  # noqa: F403


def ring_attention(query, key, value, comm):
    right, left, time = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, query.shape[2]
    blocks, scores, values = torch.stack((key, value)), [], []
    for step in range(comm.size):
        if step:
            arriving = torch.empty_like(blocks)
            comm.exchange(blocks, right, arriving, left)
            blocks = arriving
        future = torch.ones(time, time, dtype=torch.bool).triu(1) if step == 0 else torch.tensor(False)
        scores.append((query @ blocks[0].transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(future, -torch.inf))
        values.append(blocks[1])
    return torch.cat(scores, -1).softmax(-1) @ torch.cat(values, 2)
