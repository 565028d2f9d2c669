"""ZeRO++: FSDP over all ranks, with a quarter of the bytes between nodes.

    bytes between nodes for N bytes of 16-bit parameters FSDP    ZeRO++
    gather in forward                                    N       N/2      in 8 bits
    gather in backward                                   N       0        from a second partition, inside the node
    reduce-scatter of gradients                          N       N/4      in 4 bits

    gather     rank (n, g) has shard n G + g ── across nodes ─▶ all shards of g ── inside the node ─▶ all shards
    reduce     the other way: inside the node first, so that what crosses is already a sum

With M nodes of G ranks, a node receives (M - 1)/M of these bytes, and four bytes for each block of
numbers that share a scale. Each rank holds N/G bytes more from forward to the next step: its part
of the second partition.

Quantising is lossy. In each block 127 steps lead from 0 to the largest parameter, and parameters
are off by half a step at most. Gradients have 7 steps, and they are rounded twice, before each of
the two hops. A quantised sum cannot be passed on from rank to rank, as a ring does: ranks exchange
by all-to-all, and then each adds up. (Wang et al. 2023, ZeRO++.)
"""

from typing import Any

import torch
from torch import Tensor, nn

from minidist.full.collectives import all_gather, all_to_all
from minidist.full.comm import Communicator
from minidist.full.fsdp.flat import Direct, Flat, Transport
from minidist.full.fsdp.fsdp import FSDP
from minidist.full.fsdp.policy import MixedPrecision
from minidist.full.fsdp.ranks import Ranks
from minidist.full.placement import by_copies, copies_of
from minidist.further.few_bits import BLOCK, pack, unpack


class Nodes:
    """M nodes of G ranks: a communicator of this rank's node, and one of its counterparts on the
    other nodes.
    """

    def __init__(self, comm: Communicator, node_ranks: int) -> None:
        # twins, which only the stream's thread uses
        self.inside, self.across = (level.fork() for level in comm.levels(node_ranks))
        # nothing is rounded: parameters are gathered to be read or kept, not to compute with
        self.exact = False

    def gather(self, mine: Tensor) -> Tensor:
        """Return every rank's row [n] as [M * G, n]; rows travel in 8 bits, and integers as they
        are.
        """
        rounded = mine.is_floating_point()
        row = mine[None]
        if rounded:
            row = pack(row, bits=8)
        nodes, neighbours = self.across.size, self.inside.size
        here = all_gather(row, self.across, counts=[1] * nodes)
        rows = all_gather(here, self.inside, counts=[nodes] * neighbours)
        if rounded:
            rows = unpack(rows, len(mine), bits=8)
        return _swapped(rows, neighbours)

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the sum of all ranks' rows [n] for this rank.

        Each brings [M * G, n], which travel in 4 bits.
        """
        length = rows.shape[1]
        rows = _swapped(rows, self.across.size)  # all that goes to one neighbour together
        for comm in (self.inside, self.across):
            arrived = all_to_all(pack(rows, bits=4), comm)
            terms = unpack(arrived, length, bits=4)
            by_sender = terms.view(comm.size, -1, length)
            rows = by_sender.sum(0)
        return rows[0]


class Quantised:
    """The transport of a flat that travels in 8 bits, or only inside the node while the second
    partition is valid: `flat.second`, this rank's part of what was gathered last, if that is cut
    among the ranks of the node.
    """

    def __init__(self, nodes: Nodes, direct: Direct) -> None:
        self.nodes, self.direct = nodes, direct

    def gather(self, flat: Flat, unsharded: Tensor) -> None:
        """Fill `unsharded` with all ranks' elements of a flat."""
        inside = self.nodes.inside
        if self.nodes.exact:
            self.direct.gather(flat, unsharded)
        elif flat.second is None:
            mine = unsharded.new_zeros(row_of(flat))
            mine[: len(flat.mine)] = flat.mine
            rows = self.nodes.gather(mine)
            targets = torch.split(unsharded, flat.shard.counts)
            for row, target in zip(rows, targets, strict=True):
                target.copy_(row[: len(target)])
            flat.second = unsharded.tensor_split(inside.size)[inside.rank].clone()
        else:
            all_gather(flat.second, inside, out=unsharded)

    def reduce(self, gradient: Tensor, flat: Flat, op: str) -> Tensor:
        """Return this rank's elements of the sum, or mean, of all ranks' whole gradients."""
        counts = flat.shard.counts
        rows = gradient.new_zeros(len(counts), row_of(flat))  # one for each rank
        for row, part in zip(rows, torch.split(gradient, counts), strict=True):
            row[: len(part)] = part
        shard = self.nodes.reduce(rows)[: len(flat.mine)]
        return shard / len(counts) if op == "mean" else shard


def row_of(flat: Flat) -> int:
    """Return how many elements of each rank's shard travel: filled up with zeros to whole
    blocks.
    """
    return -(-flat.shard.counts[0] // BLOCK) * BLOCK


def hop_of(flat: Flat, microbatches: int) -> float:
    """Return the bytes of a rank's row: in the first gathering of a step and, if it is trained, in
    the reduction of each microbatch.
    """
    row = row_of(flat)
    if not flat.mine.is_floating_point():
        return row * flat.mine.itemsize
    scales = row / BLOCK * 4
    in_8_bits = row + scales
    in_4_bits = row / 2 + scales
    if not flat.trained:
        return in_8_bits
    return in_8_bits + microbatches * in_4_bits


class ZeROPlusPlus(FSDP):
    """FSDP with quantised gathering, a second partition inside each node, and quantised reduction.

    Parameters
    ----------
    model, comm, op, **options
        As for `FSDP`, without `shard_ranks`.
    node_ranks : int, optional
        How many neighbouring ranks form a node; by default those that share memory.

    Raises
    ------
    ValueError
        If `node_ranks` does not divide the number of ranks, or ranks have shared out experts.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str | None = None,
        *,
        node_ranks: int | None = None,
        **options: Any,
    ) -> None:
        self.node_ranks = len(comm.node) if node_ranks is None else node_ranks
        if self.node_ranks < 1 or comm.size % self.node_ranks:
            raise ValueError(
                f"node_ranks={node_ranks} must divide the {comm.size} ranks into nodes of one size"
            )
        super().__init__(model, comm, op, **options)

    def _make_ranks(self, shard_ranks: int | None) -> Ranks:
        """Make the communicators: those of FSDP, and those inside a node and across nodes."""
        if any(copies_of(parameter, self.comm) is not self.comm for parameter in self.names):
            raise ValueError("ZeRO++ knows no experts that ranks have shared out: use FSDP")
        ranks = super()._make_ranks(shard_ranks)
        self.nodes = Nodes(self.comm, self.node_ranks)
        return ranks

    def _make_flats(self, parameters: list[nn.Parameter], precision: MixedPrecision) -> list[Flat]:
        """Return the flats of a unit, one or more for each list of `by_copies`."""
        flats = []
        for each in by_copies(parameters):
            flats += super()._make_flats(each, precision)
        return flats

    def _make_transport(self, parameters: list[nn.Parameter]) -> Transport:
        """Return how the flat of these parameters, which are cut, is to travel."""
        return Quantised(self.nodes, self.ranks.direct(parameters))

    def volume(self, microbatches: int) -> tuple[str, float]:
        """Return what a rank sends in a step: the first gathering and the reductions quantised,
        others inside a node.
        """
        group, m = self.nodes.inside.size, microbatches
        n = sum(parameter.nbytes for parameter in self.module.parameters())
        root = 0
        for flat in self.root.flats:
            root += sum(parameter.nbytes for parameter in flat.parameters)
        again = (group - 1) / group * ((2 * m - 1) * n - m * root)
        return "the formula of ZeRO++", again + (self.comm.size - 1) * self._hops(m)

    def between_nodes(self, microbatches: int = 1) -> tuple[Communicator, float]:
        """Return the communicator to other nodes, and a step's bytes on it."""
        across = self.nodes.across
        bytes = (across.size - 1) * self._hops(microbatches)
        return across, bytes

    def _hops(self, microbatches: int) -> float:
        """The bytes of a rank's rows of all flats, see `hop_of`."""
        quantised = [flat for flat in self.flats if isinstance(flat.transport, Quantised)]
        total = 0.0
        for flat in quantised:
            total += hop_of(flat, microbatches)
        return total

    def _gather_all(self) -> None:
        """Gather every unit as it is."""
        self.nodes.exact = True
        try:
            super()._gather_all()
        finally:
            self.nodes.exact = False


def _swapped(rows: Tensor, outer: int) -> Tensor:
    """Return rows, numbered (i, j) with `outer` values of i, in the order (j, i)."""
    return rows.view(outer, len(rows) // outer, -1).transpose(0, 1).reshape(rows.shape)
