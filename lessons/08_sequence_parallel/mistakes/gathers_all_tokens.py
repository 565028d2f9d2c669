# task 4: gathers the tokens of all heads on every rank: P times the bytes, and all of the work on every rank.
from solution import *  # noqa: F403
from solution import adjoint, causal_attention


def ulysses_attention(query, key, value, comm):
    if query.shape[1] % comm.size:
        raise ValueError("heads cannot be dealt out")
    whole = [adjoint.all_gather(x, comm, 2, x.shape[2] * comm.size) for x in (query, key, value)]
    return causal_attention(*whole).chunk(comm.size, 2)[comm.rank]
