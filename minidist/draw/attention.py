"""Attention over the tokens of several ranks, recorded: whose queries have met whose keys.

               keys  0 1 2 3 4 5     a square beside the ranks' rows. A place fills, with the rank that the key is from,
    rank 0  query 0  0               when the output of this query has something of the value of this key
            query 1  0 0
    rank 1  query 2  . . 1           these two wait for the keys of rank 0
            query 3  . . 1 1

Nothing tells a recording who meets whom: it is read off what the real code computes. Queries are zero, so that all keys
weigh the same, and the value of token t is the t-th unit vector, so that an output is its query's weights themselves.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minidist.draw.player import MET, Does, Meetings, Recording
from minidist.draw.recording import Watching, record
from minidist.parallel.context.order import positions


def record_attention(
    attend: Callable[[Tensor, Tensor, Tensor, Watching], object], ranks: int, order: str = "contiguous"
) -> Recording:
    """Call `attend(query, key, value, comm)` on simulated ranks, two tokens each, and return what happened.

        record_attention(PlainRingAttention.apply, ranks=4)

    Shown are two local variables of what it calls: `block`, the keys and values at hand [2, 1, 1, 2, T], and
    `mine.output`, what this rank's queries have gathered so far [1, 1, 2, T].

    Parameters
    ----------
    order : {"contiguous", "zigzag", "striped"}
        In which the 2 P tokens lie.

    Raises
    ------
    ValueError
        If there is nothing to show: no output is there, or it stays zero.
    """
    time = 2 * ranks
    tokens = tuple(tuple(positions(order, ranks, rank, time).tolist()) for rank in range(ranks))
    owners = tuple(next(rank for rank in range(ranks) if token in tokens[rank]) for token in range(time))

    def program(comm: Watching) -> None:
        unit = torch.eye(time, dtype=torch.float64)[list(tokens[comm.rank])][None, None]  # [1, 1, 2, T]
        query = torch.zeros_like(unit)
        comm.watch("keys and values", torch.stack((unit, unit)).numpy(), variable="block")
        comm.watch(MET, query.numpy(), cells=2, variable="mine.output")
        attend(query, unit, unit, comm)

    n = 2 * 2 * time * 8  # bytes of two tokens' keys and values
    sent = {"bytes sent": f"(P − 1) n = {ranks - 1} · {n} = {(ranks - 1) * n}"}
    recording = record(program, ranks, formulas=sent, meetings=Meetings(tokens, owners))
    if not recording.deadlock and not any(step.kind == Does.MEETS for step in recording.steps):
        raise ValueError("no query met a key: keep what the queries have gathered in a local variable, `mine.output`")
    return recording
