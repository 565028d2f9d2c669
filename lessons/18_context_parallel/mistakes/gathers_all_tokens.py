# task 4: gathers the tokens of all heads on every rank: P times the bytes, and all of the work on every rank.
from solution import *  # noqa: F403
from solution import adjoint, causal_attention, heads_fault


def ulysses_attention(query, key, value, everyones, comm):
    if fault := heads_fault(query.shape[1], key.shape[1], comm.size):
        raise ValueError(fault)
    lies = everyones.argsort()
    whole = [
        adjoint.all_gather(x, comm, 2, len(everyones))[:, :, lies] for x in (query, key, value)
    ]
    return causal_attention(*whole)[:, :, everyones.chunk(comm.size)[comm.rank]]
