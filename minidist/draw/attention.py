"""Attention over the tokens of several ranks, recorded: whose queries have met whose keys.

               keys  0 1 2 3 4 5     a square beside the ranks' rows. A place fills, with the rank that the key is from,
    rank 0  query 0  0               when the output of this query has something of the value of this key
            query 1  0 0
    rank 1  query 2  . . 1           these two wait for the keys of rank 0
            query 3  . . 1 1

A recording reads off the real code's results who meets whom. Queries are zero, so that all keys
weigh the same. The value of token t is the t-th unit vector, so that an output is its query's
weights themselves.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minidist.draw.player import MET, Does, Meetings, Recording
from minidist.draw.recording import Watching, record
from minidist.full.context.order import positions


def record_attention(
    attend: Callable[[Tensor, Tensor, Tensor, Watching], object],
    ranks: int,
    order: str = "contiguous",
    tokens: int = 2,
    block: str = "block",
    output: str = "mine.output",
) -> Recording:
    """Call `attend(query, key, value, comm)` on simulated ranks, and return what happened.

        record_attention(RingAttention.apply, ranks=4, output="output")

    Two local variables of what it calls are shown: `output`, what this rank's queries have gathered
    so far [1, 1, tokens, T], and `block`, the keys and values at hand [2, 1, 1, tokens, T].

    Parameters
    ----------
    tokens : int
        The number of tokens of each rank.
    block, output : str
        The name of the variable, or of a variable and its attribute. Without a name it is not
        shown.
    order : {"contiguous", "zigzag", "striped"}
        The order in which the ranks have the tokens.

    Raises
    ------
    ValueError
        If there is nothing to show: the output is missing, or it stays zero.
    """
    time = tokens * ranks
    places = [tuple(positions(order, ranks, rank, time).tolist()) for rank in range(ranks)]
    owners = [0] * time
    for rank, mine in enumerate(places):
        for token in mine:
            owners[token] = rank

    def program(comm: Watching) -> None:
        # [1, 1, tokens, T]
        unit = torch.eye(time, dtype=torch.float64)[list(places[comm.rank])][None, None]
        query = torch.zeros_like(unit)
        if block:
            comm.watch("keys and values", torch.stack((unit, unit)).numpy(), variable=block)
        comm.watch(MET, query.numpy(), cells=tokens, variable=output)
        attend(query, unit, unit, comm)

    n = 2 * tokens * time * 8  # bytes of a rank's keys and values
    sent = {"bytes sent": f"(P − 1) n = {ranks - 1} · {n} = {(ranks - 1) * n}"}
    meetings = Meetings(tuple(places), tuple(owners))
    recording = record(program, ranks, formulas=sent, meetings=meetings)
    if not recording.deadlock and not any(step.kind == Does.MEETS for step in recording.steps):
        raise ValueError(
            "no query met a key: keep what the queries have gathered in a local variable, "
            f"`{output}`"
        )
    return recording
