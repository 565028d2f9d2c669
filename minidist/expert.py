"""Expert parallelism: tokens travel to the rank that has their expert, and come back.

    rank 0, rows by expert   0 0 1 │ 2 3 3        experts 0 and 1 are on rank 0, 2 and 3 on rank 1
    rank 1                   0 1 │ 2 2 3
                                 all-to-all
    rank 0                   0 0 1 │ 0 1          by sender, and of each sender by expert
    rank 1                   2 3 3 │ 2 2 3
                                 experts, and all-to-all back

How many rows come from whom depends on what the routers chose, so each rank first tells the others
its counts: E integers. Cost: M rows of D channels, shared out evenly among P ranks, are (P - 1)/P M D
numbers each way; backward does the same. (Lepikhin et al. 2020, GShard, section 3.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minidist.collectives import all_to_all
from minidist.comm import Communicator
from minidist.moe import route
from minidist.tensor import adjoint

Expert = Callable[[Tensor], Tensor]


def mixture_across(
    x: Tensor, router: Tensor, experts: Sequence[Expert], k: int, comm: Communicator
) -> Tensor:
    """Return the output of `moe.mixture` for this rank's tokens [N, D] and the experts of all ranks.

    `experts` are this rank's E/P; `router` [E, D] is the same everywhere. Backward is collective, too.
    """
    choice, weights = route(x, router, k)  # [N, K]
    chosen = choice.flatten()
    order = chosen.argsort(stable=True)  # places of `chosen`, by expert
    counts = chosen.bincount(minlength=len(router))
    token = order // k
    rows = x[token]  # [N K, D]: each token once for each of its experts
    made = dispatch(rows, counts, experts, comm)
    weight = weights.flatten()[order]
    weighted = weight.unsqueeze(-1) * made
    return torch.zeros_like(x).index_add(0, token, weighted)


def dispatch(rows: Tensor, counts: Tensor, experts: Sequence[Expert], comm: Communicator) -> Tensor:
    """Return what experts make of `rows` [M, D], sorted by expert: each is given `counts` [E] rows."""
    leaving = counts.view(comm.size, -1)  # by rank, and of each by expert
    arriving = all_to_all(counts, comm).view(comm.size, -1)  # by sender, and of each by expert
    received = travel(rows, leaving, arriving, comm)
    parts = torch.split(received, arriving.flatten().tolist())
    made = []
    for place, part in enumerate(parts):
        expert = experts[place % len(experts)]
        made.append(expert(part))
    return travel(torch.cat(made), arriving, leaving, comm)


def travel(rows: Tensor, leaving: Tensor, arriving: Tensor, comm: Communicator) -> Tensor:
    """Send each rank its rows, and return those that arrive; backward sends gradients back."""
    return adjoint(
        rows,
        lambda x: moved(x, leaving, arriving, comm),
        lambda gradient: moved(gradient, arriving, leaving, comm),
    )


def moved(rows: Tensor, leaving: Tensor, arriving: Tensor, comm: Communicator) -> Tensor:
    """Exchange rows, of which `leaving` and `arriving` [P, E/P] are the numbers."""
    width = rows.shape[1]
    out = leaving.sum(1) * width
    into = arriving.sum(1) * width
    flat: Tensor = all_to_all(rows.contiguous(), comm, out.tolist(), into.tolist())
    return flat.view(-1, width)
