# task 2: repeats keys and values for the heads that share them, and sends the copies round, too.
from solution import *  # noqa: F403
from solution import ring_forward as attend_around


def ring_forward(query, key, value, comm):
    copies = query.shape[1] // key.shape[1]
    return attend_around(
        query, key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1), comm
    )
