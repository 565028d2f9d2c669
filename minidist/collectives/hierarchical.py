"""Hierarchies: use the fast links inside a node first, and let as little as possible cross between nodes.

    inside each node    reduce-scatter: GPU i holds shard i of its node's sum
    across nodes        all-reduce of shard i among the GPUs i: each of them sends on its own network port
    inside each node    all-gather

With G ranks a node and N nodes, 2 (N - 1)/N n/G bytes a rank cross between nodes, where a flat ring has its slowest
link, the one between nodes, carry 2 (P - 1)/P n; and there are 2(N - 1) + 2(G - 1) latencies instead of 2(P - 1).
(Jia et al. 2018, section 4.2; Mikami et al. 2018 split as here.) Nodes of different sizes reduce to a leader each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from minidist.collectives import fast_ring, tree
from minidist.collectives.fast import chunks_of, cut
from minidist.collectives.ring import ring_all_gather

if TYPE_CHECKING:
    from minidist.collectives.reduction import Combine
    from minidist.comm.buffers import Array
    from minidist.comm.communicator import Communicator


def all_reduce(array: Array, comm: Communicator, combine: Combine) -> None:
    """Leave the reduction of all ranks' arrays in every rank's `array`."""
    inside, across, equal = _levels(comm)
    if not equal:
        tree.reduce(array, inside, 0, combine)
        if inside.rank == 0:
            fast_ring.all_reduce(array, across, combine)
        tree.broadcast(array, inside, 0)
        return
    chunks = chunks_of(array, cut(len(array), inside.size))
    mine = chunks[inside.rank]
    fast_ring.reduce_scatter(chunks, mine, inside, combine)
    fast_ring.all_reduce(mine, across, combine)
    ring_all_gather(chunks, inside)


def broadcast(array: Array, comm: Communicator, root: int) -> None:
    """From the root to one rank of each node, then inside the nodes: n bytes enter a node once."""
    inside, across, _ = _levels(comm)
    home = comm.node.index(root) if root in comm.node else None
    if home is not None:  # the root's node learns first, so that its member in every `across` group can pass it on
        tree.broadcast(array, inside, home)
    if inside.rank == 0:
        source = next(r for r, member in enumerate(across.members) if member in _node_of(comm, root))
        tree.broadcast(array, across, source)
    if home is None:
        tree.broadcast(array, inside, 0)


class Levels(NamedTuple):
    """This rank's communicators inside its node and across nodes, and whether all nodes are alike."""

    inside: Communicator
    across: Communicator
    equal: bool


def _levels(comm: Communicator) -> Levels:
    def make() -> Levels:
        inside = comm.split(comm.node[0]).internal
        across = comm.split(comm.node.index(comm.rank)).internal
        return Levels(inside, across, len({len(node) for node in comm.nodes}) == 1)

    return comm.keep(Levels, make)


def _node_of(comm: Communicator, root: int) -> set[int]:
    return {comm.members[rank] for rank in comm.nodes[root]}
