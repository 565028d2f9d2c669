# task 5: keeps the keys and values that come by, and takes one softmax over all of them: all T keys on every rank.
import torch
from solution import *  # noqa: F403


def ring_attention(query, key, value, comm):
    right, left, time = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, query.shape[2]
    collected = [torch.stack((key, value))]
    for _ in range(comm.size - 1):
        collected.append(torch.empty_like(collected[0]))
        comm.exchange(collected[-2], right, collected[-1], left)
    keys, values = torch.cat(collected[: comm.rank + 1][::-1], -2)
    scores = query @ keys.transpose(-1, -2) / query.shape[-1] ** 0.5
    own = torch.arange(time) + comm.rank * time
    later = torch.arange(keys.shape[-2]) > own[:, None]
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ values
