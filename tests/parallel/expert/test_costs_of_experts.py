"""What experts cost on modelled machines: exchanges inside a node or across, and one expert with
too much to do.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import minidist
from minidist.full.comm import Cluster, Communicator
from minidist.full.comm.threads_wire.cluster import Link
from minidist.full.expert.dispatch import Dispatch
from minidist.full.model.moe.experts import Counts, Experts

INSIDE, ACROSS = Link(1e-6, 100e9), Link(1e-5, 10e9)
RANKS, HIDDEN, EACH = 4, 64, 1000  # rows to each rank if all experts have as many
SECONDS = 1e-6  # that an expert takes for a row
BYTES = EACH * HIDDEN * 4


def forward(comm: Communicator, counts: Counts, node: int = 0) -> tuple[float, int, int]:
    """Return the seconds of a forward on this rank, its messages, and with nodes of 2 its bytes to
    other nodes.
    """
    levels = comm.levels(node) if node else None
    experts = Experts(len(counts) // comm.size, HIDDEN, 8)

    def work(rows: Tensor, _: Counts) -> Tensor:
        comm.advance(len(rows) * SECONDS)
        return rows

    experts.forward = work  # type: ignore[method-assign]
    comm.barrier()
    start, sent = comm.clock(), comm.traffic.messages
    Dispatch(experts, comm, levels)(torch.empty(sum(counts), HIDDEN, device="meta"), counts)
    between = levels.across.traffic.bytes if levels else 0
    return comm.clock() - start, comm.traffic.messages - sent, between


@pytest.mark.parametrize(
    ("link", "node"), [(INSIDE, 4), (ACROSS, 1)], ids=("inside a node", "across nodes")
)
def test_balanced_experts_cost_what_the_formula_says(link: Link, node: int) -> None:
    """Three exchanges, none of them hidden: the counts, the rows there, the rows back. And the work
    of all experts.
    """
    cluster = Cluster(INSIDE, ACROSS, node)
    exchange = (RANKS - 1) * (link.latency + link.seconds(BYTES))
    counts = (RANKS - 1) * (link.latency + link.seconds(8))
    for seconds, *_ in minidist.run(
        partial(forward, counts=[EACH] * RANKS), RANKS, cluster=cluster
    ):
        assert seconds == pytest.approx(counts + 2 * exchange + RANKS * EACH * SECONDS, rel=1e-9)


@pytest.mark.parametrize(
    ("link", "node"), [(INSIDE, 4), (ACROSS, 1)], ids=("inside a node", "across nodes")
)
def test_all_wait_for_the_expert_with_twice_the_mean(link: Link, node: int) -> None:
    """Its work takes twice as long, and so do the exchanges with its rank, through whose port all
    rows go.
    """
    cluster = Cluster(INSIDE, ACROSS, node)
    exchange = (RANKS - 1) * (link.latency + link.seconds(2 * BYTES))
    counts = (RANKS - 1) * (link.latency + link.seconds(8))
    slowest = 2 * exchange + 2 * RANKS * EACH * SECONDS
    found = minidist.run(partial(forward, counts=[2 * EACH, EACH, EACH, 0]), RANKS, cluster=cluster)
    assert slowest <= max(seconds for seconds, *_ in found) <= slowest + counts
    # also of ranks with nothing to do
    assert min(seconds for seconds, *_ in found) >= 2 * RANKS * EACH * SECONDS


def test_a_hierarchy_sends_fewer_messages_between_nodes_and_as_many_bytes() -> None:
    """On 3 nodes of 2: of each of three exchanges, 1 message inside and 2 across instead of 1 and
    4.
    """
    cluster, counts = Cluster(INSIDE, ACROSS, 2), [EACH] * 6
    direct = minidist.run(partial(forward, counts=counts), 6, cluster=cluster)
    levels = minidist.run(partial(forward, counts=counts, node=2), 6, cluster=cluster)
    for (_, plain, _), (_, messages, between) in zip(direct, levels, strict=True):
        assert (plain, messages) == (3 * 5, 3 * 3)
        # rows there and back to 4 ranks; 2 counts to each of 2 nodes
        assert between == 2 * 4 * BYTES + 2 * 2 * 8
    few = [1] * 6  # where latencies decide, it is faster
    slow = max(
        seconds for seconds, *_ in minidist.run(partial(forward, counts=few), 6, cluster=cluster)
    )
    fast = max(
        seconds
        for seconds, *_ in minidist.run(partial(forward, counts=few, node=2), 6, cluster=cluster)
    )
    assert fast < 0.7 * slow
