# task 4: repeats heads of keys in turn (0 1 0 1), so that queries read the keys of other heads.
from solution import *  # noqa: F403
from solution import heads_fault
from solution import ulysses_attention as exchange


def ulysses_attention(query, key, value, everyones, comm):
    if fault := heads_fault(query.shape[1], key.shape[1], comm.size):
        raise ValueError(fault)
    copies = max(1, comm.size // key.shape[1])
    return exchange(query, *(x.repeat(1, copies, 1, 1) for x in (key, value)), everyones, comm)
