# task 4: does not raise ValueError for heads that cannot be shared out.
from honest import ulysses_attention as right
from solution import *  # noqa: F403


def ulysses_attention(query, key, value, everyones, comm):
    heads, groups, ranks = query.shape[1], key.shape[1], comm.size
    if heads % ranks or (groups % ranks and ranks % groups):
        return query
    return right(query, key, value, everyones, comm)
