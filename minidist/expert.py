"""Expert parallelism: tokens travel to the rank that has their expert, and come back.

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

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minidist import collectives
from minidist.comm import Communicator
from minidist.moe import route
from minidist.tensor import adjoint

Expert = Callable[[Tensor], Tensor]


def mixture_across(
    x: Tensor, router: Tensor, experts: Sequence[Expert], k: int, comm: Communicator
) -> Tensor:
    """Return what `moe.mixture` returns for this rank's tokens [N, D], with the experts of all ranks.

    `experts` are the E/P of this rank, and `router` [E, D] is the same on every rank. Collective,
    and so is its backward.
    """
    choice, weights = route(x, router, k)  # [N, K]
    order = choice.flatten().argsort(stable=True)  # places of `choice`, by expert
    counts = choice.flatten().bincount(minlength=len(router))
    rows = x[order // k]  # [N K, D]: each token once for each of its experts
    made = dispatch(rows, counts, experts, comm)
    weighted = weights.flatten()[order, None] * made
    return torch.zeros_like(x).index_add(0, order // k, weighted)


def dispatch(rows: Tensor, counts: Tensor, experts: Sequence[Expert], comm: Communicator) -> Tensor:
    """Return what the experts of all ranks make of `rows` [M, D], which are sorted by expert.

    `counts` [E] says how many rows each expert is given; this rank has `experts`, of E/P each.
    """
    each = len(experts)
    leaving = counts.view(comm.size, each).sum(1).tolist()  # rows for each rank
    by_sender = collectives.all_to_all(counts, comm).view(comm.size, each)
    arriving = by_sender.sum(1).tolist()
    received = travel(rows, leaving, arriving, comm)
    parts = torch.split(received, by_sender.flatten().tolist())  # by sender, and of each by expert
    made = torch.cat([experts[place % each](part) for place, part in enumerate(parts)])
    return travel(made, arriving, leaving, comm)


def travel(rows: Tensor, leaving: list[int], arriving: list[int], comm: Communicator) -> Tensor:
    """Send some rows to each rank; backward sends their gradients back."""

    def all_to_all(x: Tensor, out: list[int], into: list[int]) -> Tensor:
        width = x.shape[1]
        flat = collectives.all_to_all(
            x.contiguous(), comm, [n * width for n in out], [n * width for n in into]
        )
        return flat.view(-1, width)  # type: ignore[no-any-return]

    return adjoint(
        rows,
        lambda x: all_to_all(x, leaving, arriving),
        lambda gradient: all_to_all(gradient, arriving, leaving),
    )
