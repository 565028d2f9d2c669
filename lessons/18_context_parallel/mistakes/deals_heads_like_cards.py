# task 4: rank r gets heads r, r + P, ... as cards are dealt, so queries meet the keys of other heads.
import torch
from honest import ulysses_attention as by_neighbours
from solution import *  # noqa: F403


def ulysses_attention(query, key, value, everyones, comm):
    heads, ranks = query.shape[1], comm.size
    if heads % ranks or (key.shape[1] % ranks and ranks % key.shape[1]):
        raise ValueError("these heads cannot be shared out")
    if key.shape[1] < ranks:
        key, value = (x.repeat_interleave(ranks // key.shape[1], 1) for x in (key, value))

    def dealt(count):
        return torch.arange(count).view(-1, ranks).T.flatten()

    mine = [x[:, dealt(x.shape[1])] for x in (query, key, value)]
    return by_neighbours(*mine, everyones, comm)[:, dealt(heads).argsort()]
