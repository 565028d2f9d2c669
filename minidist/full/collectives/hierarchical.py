"""Hierarchies: use the fast links inside a node first, and send as few bytes as possible between
nodes.

    inside each node    reduce-scatter: GPU i holds shard i of its node's sum
    across nodes        all-reduce of shard i among the GPUs i: each of them sends on its own network port
    inside each node    all-gather

With G ranks a node and N nodes, each rank sends 2 (N - 1)/N n/G bytes to another node. In a flat
ring the links between nodes, the slowest, carry 2 (P - 1)/P n bytes each. There are
2(N - 1) + 2(G - 1) latencies instead of 2(P - 1). Nodes of different sizes reduce to one leader
each. (Jia et al. 2018, section 4.2; Mikami et al. 2018 split as here.)
"""

from minidist.full.collectives import fast_ring, tree
from minidist.full.collectives.fast import cut
from minidist.full.collectives.reduction import Combine
from minidist.full.comm.buffers import Array, Chunks
from minidist.full.comm.communicator import Communicator
from minidist.ring import ring_all_gather


def all_reduce(array: Array, comm: Communicator, combine: Combine) -> None:
    """Leave the reduction of all ranks' arrays in every rank's `array`."""
    levels = comm.node_levels()
    inside, across = levels.inside.internal, levels.across.internal
    equal = len({len(node) for node in comm.nodes}) == 1
    if not equal:
        tree.reduce(array, inside, 0, combine)
        if inside.rank == 0:
            fast_ring.all_reduce(array, across, combine)
        tree.broadcast(array, inside, 0)
        return
    chunks = Chunks(array, cut(len(array), inside.size))
    mine = chunks[inside.rank]
    fast_ring.reduce_scatter(chunks, mine, inside, combine)
    fast_ring.all_reduce(mine, across, combine)
    ring_all_gather(chunks, inside)
