"""Expert parallelism on a page: rows go to the rank that has their expert, and what it makes of
them comes back.

    rank 0, rows by expert   0 0 1 │ 2 3 3        experts 0 and 1 are on rank 0, 2 and 3 on rank 1
    rank 1                   0 1 │ 2 2 3
                                 all-to-all
    rank 0                   0 0 1 │ 0 1          by sender, and of each sender by expert
    rank 1                   2 3 3 │ 2 2 3
                                 experts, and all-to-all back

How many rows come from whom depends on what the routers chose, so each rank first tells the others
its counts: E integers, in an all-to-all of their own.

Cost: M rows of D channels that are shared out evenly among P ranks send (P - 1)/P M D numbers each
way, in P - 1 messages; backward does the same. With k experts a token, that is 2 k (P - 1)/P as
much as the tokens themselves in forward. (Lepikhin et al. 2020, GShard, section 3.2; Fedus et al.
2021.)
"""

import torch
from torch import Tensor

import minidist.full.collectives as collectives
from minidist.full.adjoint import all_to_all
from minidist.full.collectives.fast import cut
from minidist.full.comm import Communicator
from minidist.full.model.moe.experts import Counts, Experts


def plain_dispatch(rows: Tensor, counts: Counts, experts: Experts, comm: Communicator) -> Tensor:
    """Return what the experts of all ranks make of `rows` [M, D], which are sorted by expert.

    `counts` are of all E.

    Experts are numbered by rank, in the cut of `numpy.array_split`; `experts` are those of this
    rank. Collective.
    """
    held = cut(len(counts), comm.size)  # experts of each rank
    leaving = [sum(of_rank.tolist()) for of_rank in torch.split(torch.tensor(counts), held)]
    told = collectives.all_to_all(
        torch.tensor(counts), comm, "auto", held, [held[comm.rank]] * comm.size
    )
    arriving: list[Counts] = told.view(comm.size, -1).tolist()  # of each sender, by expert
    came = [sum(of_sender) for of_sender in arriving]
    received = all_to_all(rows, comm, leaving, came)
    parts = zip(torch.split(received, came), arriving, strict=True)
    made = torch.cat([experts(part, of_sender) for part, of_sender in parts])
    return all_to_all(made, comm, came, leaving)
