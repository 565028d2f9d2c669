# task 4: attends before it exchanges anything: no token sees one of another rank.
import torch
from solution import *  # noqa: F403
from solution import adjoint, causal_attention, heads_fault


def ulysses_attention(query, key, value, everyones, comm):
    ranks = comm.size
    if fault := heads_fault(query.shape[1], key.shape[1], ranks):
        raise ValueError(fault)
    key, value = (x.repeat_interleave(max(1, ranks // x.shape[1]), 1) for x in (key, value))

    def trade(x, split, join):
        return torch.cat(
            adjoint.all_to_all(torch.stack(x.chunk(ranks, split)), comm).unbind(), join
        )

    return trade(trade(causal_attention(query, key, value), 1, 2), 2, 1)
