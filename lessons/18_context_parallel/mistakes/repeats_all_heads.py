# task 4: repeats keys and values for all heads of queries before it exchanges them: more bytes than it needs.
from solution import *  # noqa: F403
from solution import heads_fault
from solution import ulysses_attention as exchange


def ulysses_attention(query, key, value, everyones, comm):
    if fault := heads_fault(query.shape[1], key.shape[1], comm.size):
        raise ValueError(fault)
    copies = query.shape[1] // key.shape[1]
    return exchange(query, *(x.repeat_interleave(copies, 1) for x in (key, value)), everyones, comm)
