# task 4: sorts the tokens for attention, and sends the result back in that order, to ranks that have other tokens.
import torch
from solution import *  # noqa: F403
from solution import adjoint, causal_attention, heads_fault


def ulysses_attention(query, key, value, everyones, comm):
    ranks, lies = comm.size, everyones.argsort()
    if fault := heads_fault(query.shape[1], key.shape[1], ranks):
        raise ValueError(fault)
    key, value = (x.repeat_interleave(max(1, ranks // x.shape[1]), 1) for x in (key, value))

    def trade(x, split, join):
        return torch.cat(
            adjoint.all_to_all(torch.stack(x.chunk(ranks, split)), comm).unbind(), join
        )

    found = causal_attention(*(trade(x, 1, 2)[:, :, lies] for x in (query, key, value)))
    return trade(found, 2, 1)
