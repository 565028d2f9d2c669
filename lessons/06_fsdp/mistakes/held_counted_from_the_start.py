# task 1: says where the pieces lie among all elements instead of within their parameter.
from solution import *  # noqa: F403
from solution import cut as right_cut


def cut(parameters, comm):
    shard, held = right_cut(parameters, comm)
    starts = [sum(p.numel() for p in parameters[:number]) for number in range(len(parameters))]
    return shard, [
        (start + first, start + last) for start, (first, last) in zip(starts, held, strict=True)
    ]
