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

from minidist.collectives import all_gather, all_to_all
from minidist.comm import Communicator
from minidist.memory.precision.blocks import BLOCK, pack, unpack
from minidist.parallel.placement import expert_groups_of
from minidist.parallel.sharded.fsdp import FSDP
from minidist.parallel.sharded.units import Flat, MixedPrecision


class Nodes:
    """M nodes of G ranks: a communicator of this rank's node, and one of its counterparts on the
    other nodes.
    """

    def __init__(self, comm: Communicator, node_ranks: int) -> None:
        node, place = divmod(comm.rank, node_ranks)
        self.inside = comm.split(node).fork()  # twins, which only the stream's thread uses
        self.across = comm.split(place).fork()
        # nothing is rounded: parameters are gathered to be read or kept, not to compute with
        self.exact = False

    def gather(self, mine: Tensor) -> Tensor:
        """Return every rank's row [n] as [M * G, n]; rows travel in 8 bits, and integers as they
        are.
        """
        rounded = mine.is_floating_point()
        row = pack(mine[None], bits=8) if rounded else mine[None]
        here = all_gather(row, self.across, counts=[1] * self.across.size)
        rows = all_gather(here, self.inside, counts=[self.across.size] * self.inside.size)
        return _swapped(unpack(rows, len(mine), bits=8) if rounded else rows, self.inside.size)

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the sum of all ranks' rows [n] for this rank; each brings [M * G, n], which travel
        in 4 bits.
        """
        rows = _swapped(rows, self.across.size)  # all that goes to one neighbour together
        for comm in (self.inside, self.across):
            arrived = all_to_all(pack(rows, bits=4), comm)
            rows = unpack(arrived, rows.shape[1], bits=4).view(comm.size, -1, rows.shape[1]).sum(0)
        return rows[0]


class QuantisedFlat(Flat):
    """Parameters that travel in 8 bits, or only inside the node while the second partition is
    valid.

    Attributes
    ----------
    second : Tensor or None
        This rank's part of what was gathered last, if that is cut among the ranks of the node.
    """

    def __init__(self, nodes: Nodes, *args: Any, **options: Any) -> None:
        self.nodes = nodes
        self.second: Tensor | None = None
        super().__init__(*args, **options)
        # elements of every rank's shard, filled up with zeros
        self.row = -(-self.counts[0] // BLOCK) * BLOCK

    @property
    def hop(self) -> float:
        """Bytes of a rank's row: in the first gathering of a step and, if it is trained, in the
        reduction.
        """
        scales = self.row / BLOCK * 4
        if not self.mine.is_floating_point():
            return self.row * self.mine.itemsize
        return self.row + scales + (self.row / 2 + scales if self.trained else 0)

    def publish(self) -> None:
        """Publish new values; the second partition is out of date."""
        super().publish()
        self.second = None

    def fetch(self, whole: Tensor) -> None:
        """Gather all elements. Runs on the stream."""
        inside = self.nodes.inside
        if self.nodes.exact:
            super().fetch(whole)
        elif self.second is None:
            mine = whole.new_zeros(self.row)
            mine[: len(self.mine)] = self.mine
            for row, target in zip(
                self.nodes.gather(mine), torch.split(whole, self.counts), strict=True
            ):
                target.copy_(row[: len(target)])
            self.second = whole.tensor_split(inside.size)[inside.rank].clone()
        else:
            all_gather(self.second, inside, out=whole)

    def stored(self) -> list[Tensor]:
        """Return what this rank has of the parameters between uses: the second partition, too."""
        return [self.mine] if self.second is None else [self.mine, self.second]

    def reduce(self, gradient: Tensor, op: str) -> Tensor:
        """Return this rank's elements of the sum, or mean, of all ranks' whole gradients. Runs on
        the stream.
        """
        rows = gradient.new_zeros(self.comm.size, self.row)  # one for each rank
        for row, part in zip(rows, torch.split(gradient, self.counts), strict=True):
            row[: len(part)] = part
        shard = self.nodes.reduce(rows)[: len(self.mine)]
        return shard / self.comm.size if op == "mean" else shard


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

    def _divide(self, shard_ranks: int | None) -> None:
        """Make the communicators: those of FSDP, and those inside a node and across nodes."""
        if any(map(expert_groups_of, self.names)):
            raise ValueError(
                "ZeRO++ knows no experts that ranks have shared out: use FSDP, or ep=1"
            )
        super()._divide(shard_ranks)
        self.nodes = Nodes(self.comm, self.node_ranks)

    def volume(self, microbatches: int) -> tuple[str, float]:
        """Return what a rank sends in a step: the first gathering and the reduction quantised,
        others inside a node.
        """
        group, m = self.nodes.inside.size, microbatches
        n = sum(parameter.nbytes for parameter in self.module.parameters())
        root = sum(parameter.nbytes for flat in self.root.flats for parameter in flat.parameters)
        again = (group - 1) / group * ((2 * m - 1) * n - m * root)
        return "the formula of ZeRO++", again + (self.comm.size - 1) * self._hops

    def between_nodes(self) -> tuple[Communicator, float]:
        """Return the communicator to other nodes, and a step's bytes on it, whatever the number of
        microbatches.
        """
        return self.nodes.across, (self.nodes.across.size - 1) * self._hops

    @property
    def _hops(self) -> float:
        return sum(flat.hop for flat in self.flats if isinstance(flat, QuantisedFlat))

    def _unshard_all(self) -> None:
        """Gather every unit as it is."""
        self.nodes.exact = True
        super()._unshard_all()
        self.nodes.exact = False

    def _flat(self, parameters: list[nn.Parameter], precision: MixedPrecision) -> Flat:
        link = self.links[self.shard_comm]
        return QuantisedFlat(
            self.nodes, parameters, self.names, self.shard_comm, precision, self.allocate, link=link
        )


def _swapped(rows: Tensor, outer: int) -> Tensor:
    """Return rows, numbered (i, j) with `outer` values of i, in the order (j, i)."""
    return rows.view(outer, len(rows) // outer, -1).transpose(0, 1).reshape(rows.shape)
