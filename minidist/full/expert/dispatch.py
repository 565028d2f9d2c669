"""Tokens to experts and back, with one product for each expert, whoever sent its rows.

There are two ways to send fewer bytes.

A *hierarchical* exchange goes inside nodes first. Rank i of a node gets from its neighbours all
that any of them sends to the ranks i of other nodes, and passes it on: on N nodes of G ranks, a
rank sends N - 1 messages to other nodes instead of G (N - 1), each G times as long. The bytes
between nodes are the same; up to as many again move inside. (Rajbhandari et al. 2022,
DeepSpeed-MoE, section 5.2; Nie et al. 2022, HetuMoE.)

With *fp8*, rows travel to the experts as 8-bit floats, each 128 channels with a scale of 4 bytes:
1 + 4/128 bytes an element. What comes back, and all gradients, keep their dtype, since sums of 8-bit
numbers would lose too much. (DeepSeek-AI 2024, V3, section 3.3.2.)
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import minidist.full.collectives as collectives
from minidist.full.adjoint import Linear, Map
from minidist.full.collectives.fast import cut
from minidist.full.comm import Communicator
from minidist.full.comm.communicator import Levels
from minidist.full.model.moe.experts import (
    Counts,
    Experts,
)
from minidist.full.precision.blocks import pack_float8, unpack_float8


class Dispatch:
    """A `Compute`: rows, sorted by expert, go to the experts of all ranks and come back.

    Calling it is collective.

    Parameters
    ----------
    experts : Experts
        Those of this rank; experts are numbered by rank, in the cut of `numpy.array_split`.
    comm : Communicator
        The ranks that share the experts.
    levels : Levels, optional
        Send in this hierarchy of the same ranks.
    fp8 : bool
        Send the rows to their experts in 8 bits.
    """

    def __init__(
        self,
        experts: Experts,
        comm: Communicator,
        levels: Levels | None = None,
        fp8: bool = False,
    ) -> None:
        self.experts, self.comm = experts, comm
        self.levels, self.fp8 = levels, fp8

    def __call__(self, rows: Tensor, counts: Counts) -> Tensor:
        """Return what the experts make of `rows` [M, D]; the `counts` are of all E experts."""
        route = Route(counts, self.comm, self.levels, rows.device)
        there: Map = route.there
        if self.fp8:
            there = partial(in_float8, route.there)
        received: Tensor = Linear.apply(rows, there, route.back)  # type: ignore[no-untyped-call]
        outputs = self.experts(received, route.counts)
        returned: Tensor = Linear.apply(outputs, route.back, route.there)  # type: ignore[no-untyped-call]
        return returned


def in_float8(send: Map, rows: Tensor) -> Tensor:
    """Send rows [M, D] in 8 bits; return those that came, in the dtype of `rows`."""
    received = send(pack_float8(rows))
    return unpack_float8(received, rows.shape[1]).to(rows.dtype)


class Leg(NamedTuple):
    """An exchange among the ranks of `comm`: rows are put in an order (None: as they are), then
    sent to each rank.
    """

    order: Tensor | None
    comm: Communicator
    sent: list[int]
    received: list[int]


class Route:
    """How the rows of one forward travel. Making it sends counts: one small all-to-all on each leg.

    Attributes
    ----------
    counts : list of int
        The rows that come to each expert of this rank.
    """

    def __init__(
        self, counts: Counts, comm: Communicator, levels: Levels | None, device: torch.device
    ) -> None:
        inside, across = levels or (comm, None)
        self.device = torch.device("cpu") if device.type == "meta" else device
        experts = cut(len(counts), comm.size)  # of each rank; the first ranks have most
        by_rank = torch.split(torch.tensor(counts), experts)
        table = pad_sequence(list(by_rank), batch_first=True)  # [P, experts]
        table = table.view(-1, inside.size, experts[0])  # [N, G, experts]
        self.legs: list[Leg] = []
        table = self._exchange(table, inside)
        if across is None:
            table = table.transpose(0, 1)
        else:
            table = self._exchange(table, across)
        # now rows lie by sender; therefore sort them by expert, and of each expert by sender
        self.last = order_of(table, (2, 0, 1)).to(self.device)
        of_experts = table.sum((0, 1))
        self.counts = of_experts[: experts[comm.rank]].tolist()

    def _exchange(self, table: Tensor, comm: Communicator) -> Tensor:
        """Add a leg to the ranks of the second dim.

        Return the counts that come, by sender in the first dim.
        """
        leaving = table.transpose(0, 1).contiguous()
        arriving = collectives.all_to_all(leaving.to(self.device), comm).cpu()
        order = None
        if len(table) > 1:
            order = order_of(table, (1, 0, 2)).to(self.device)
        sent = leaving.sum((1, 2)).tolist()
        received = arriving.sum((1, 2)).tolist()
        self.legs.append(Leg(order, comm, sent, received))
        return arriving

    def there(self, rows: Tensor) -> Tensor:
        """Send rows [M, ...] on their way; return those that come, sorted by expert."""
        for order, comm, sent, received in self.legs:
            if order is not None:
                rows = rows.index_select(0, order)
            rows = rows.contiguous()
            rows = collectives.all_to_all(rows, comm, "auto", sent, received)
        return rows.index_select(0, self.last)

    def back(self, rows: Tensor) -> Tensor:
        """Send rows in the order of `there`'s result back.

        Return them in the order of what was sent.
        """
        rows = undone(rows, self.last)
        for order, comm, sent, received in reversed(self.legs):
            rows = collectives.all_to_all(rows, comm, "auto", received, sent)
            if order is not None:
                rows = undone(rows, order)
        return rows


def order_of(table: Tensor, dims: tuple[int, int, int]) -> Tensor:
    """Return the index that puts blocks of rows into the order `dims`.

    Rows lie in blocks (a, b, c) with `table[a, b, c]` rows each.
    """
    ends = table.flatten().cumsum(0).view(table.shape)
    starts = (ends - table).permute(dims).flatten()
    lengths = table.permute(dims).flatten()
    new_starts = lengths.cumsum(0) - lengths
    shifts = (starts - new_starts).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) + shifts


def undone(rows: Tensor, order: Tensor) -> Tensor:
    """Return the rows x of which `rows` are x[order]."""
    before = torch.empty_like(order)
    before[order] = torch.arange(len(order), device=order.device)
    return rows.index_select(0, before)
