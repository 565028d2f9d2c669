# task 4: trades the queries first, and finds only then that the heads cannot be dealt out.
from solution import *  # noqa: F403
from solution import ulysses_attention as attend

from minidist.collectives import all_to_all


def ulysses_attention(query, key, value, comm):
    if query.shape[1] % comm.size:
        all_to_all(query.contiguous(), comm, send_counts=[0] * (comm.size - 1) + [len(query)])
    return attend(query, key, value, comm)
