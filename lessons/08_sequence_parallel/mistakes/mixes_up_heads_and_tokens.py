# task 4: takes what came from the ranks for heads instead of for stretches of tokens.
import torch
from solution import *  # noqa: F403
from solution import adjoint, causal_attention


def ulysses_attention(query, key, value, comm):
    if query.shape[1] % comm.size:
        raise ValueError("heads cannot be dealt out")

    def trade(x):
        chunks = torch.cat(x[None].chunk(comm.size, 2))
        return torch.cat(adjoint.all_to_all(chunks, comm).unbind(), 1)

    return trade(causal_attention(trade(query), trade(key), trade(value)))
