# task 4: exchanges the queries first, and finds only then that the heads cannot be shared out.
from solution import *  # noqa: F403
from solution import heads_fault
from solution import ulysses_attention as exchange

from minidist.full.collectives import all_to_all


def ulysses_attention(query, key, value, everyones, comm):
    if heads_fault(query.shape[1], key.shape[1], comm.size):
        all_to_all(query.contiguous(), comm, send_counts=[0] * (comm.size - 1) + [len(query)])
    return exchange(query, key, value, everyones, comm)
